// A call that is ready to run: what is computed by what, with everything decided that does not depend on where tensors lie.
#pragma once
#include "registry.h"

namespace ai3::ops {

template <class P>
struct Prepared {
  const Entry* entry;
  const Algorithm<P>* algorithm;
  P problem;
  int64_t workspace;  // bytes, weights packed beforehand

  void execute(const Buffers& buffers, Workspace& memory) const { algorithm->run(problem, buffers, memory); }
};

// Of a method that runs on the CPU with weights that are packed where it packs; throws why it cannot.
template <class P>
Prepared<P> prepare(const Entry& entry, const P& p) {
  Reason reason;
  const Entry* chosen = select(entry, Device::cpu, p, reason);
  if (!chosen) refused(entry, Device::cpu, p, reason);
  const auto* algorithm = chosen->algorithm<P>(Device::cpu);
  return {chosen, algorithm, p, algorithm->traits.workspace ? algorithm->traits.workspace(p) : 0};
}

}  // namespace ai3::ops
