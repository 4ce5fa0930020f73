// The passes over memory of csrc/algos/program, compiled for this machine.
#pragma once
#include "../../algos/program/kernels.h"

namespace ai3::ops {

const ProgramKernels& passes();
// Makes rows of an image that follow each other in both orders one row, where they are short: squares of registers are then full.
// Not where images are fewer than threads, which then share rows.
void join_rows(CopyProblem& p);

}  // namespace ai3::ops
