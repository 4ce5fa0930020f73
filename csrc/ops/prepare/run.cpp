// Memory beyond what an algorithm stated.
#include "run.h"

namespace ai3::ops {

char* LentWorkspace::lend(Workspace& workspace, int64_t bytes) {
  auto& self = static_cast<LentWorkspace&>(workspace);
  if (bytes < 0 || bytes >= int64_t{1} << 62) throw NotEnoughMemory(bytes);
  const int64_t whole = std::max<int64_t>(bytes, 64);
  return static_cast<char*>(self.lent.emplace_back(empty({whole}, ScalarType::Byte, self.like)).mutable_data_ptr());
}

}  // namespace ai3::ops
