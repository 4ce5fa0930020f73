#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include "support.h"

char current_case[512];

namespace {

struct sigaction before;

// A touched guard page ends the process; this says in which case, then leaves it to the handler before (AddressSanitizer's).
void on_fault(int) {
  constexpr char message[] = "\nmemory fault in: ";
  if (write(STDERR_FILENO, message, sizeof(message) - 1) < 0 ||
      write(STDERR_FILENO, current_case, strnlen(current_case, sizeof(current_case))) < 0 || write(STDERR_FILENO, "\n", 1) < 0)
    _exit(1);
  sigaction(SIGSEGV, &before, nullptr);  // the faulting instruction runs again
}

}  // namespace

void register_kernel_tests();
void register_guard_tests();
void register_thread_tests();

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  struct sigaction action = {};
  action.sa_handler = on_fault;
  sigaction(SIGSEGV, &action, &before);
  register_kernel_tests();
  register_guard_tests();
  register_thread_tests();
  return RUN_ALL_TESTS();
}
