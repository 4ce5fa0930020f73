// Locks that calls wait for, and fork().
#pragma once
#include <pthread.h>

namespace ai3::ops {

// Has locks taken before the process forks and given back after it, on both sides. A thread that held one at that moment does not
// exist in the child, such as a worker of a data loader, whose first call would wait for it for ever. `lock` takes std::mutexes:
// a shared_mutex knows its owner by a number that is another one in the child.
inline int guard_at_fork(void (*lock)(), void (*unlock)()) { return pthread_atfork(lock, unlock, unlock); }

}  // namespace ai3::ops
