// Attention in tiles, for algorithms that come down to it. The kernel is compiled once (flash.cpp) and called by each of them.
#pragma once
#include "problem.h"

namespace ai3::inline AI3_LEVEL {

// Bytes, and the call.
int64_t flash_workspace(const AttentionProblem& p);
void attend_flash(const AttentionProblem& p, const AttentionOperands& m, Workspace& workspace);
int64_t flash_backward_workspace(const AttentionProblem& p, const AttentionGradients& m);
void differentiate_flash(const AttentionProblem& p, const AttentionGradients& m, Workspace& workspace);

}  // namespace ai3::inline AI3_LEVEL
