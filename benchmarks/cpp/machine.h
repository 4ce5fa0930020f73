// Benchmarks of the machine itself, beside which kernels are read.
#pragma once

namespace ai3::bench {

// Registers machine/<what>/threads:N for one thread and for `most_threads`: multiply-adds in registers; read: the same bytes over
// and over; reduce: n lines read for one that is written.
void add_machine(int most_threads);

}  // namespace ai3::bench
