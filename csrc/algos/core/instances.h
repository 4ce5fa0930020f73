// What most kernels take of packed products and copies, compiled once for each level in instances.cpp instead of in every file
// that includes gemm.h: a quarter of the kernels' code was copies of it. Users' algorithms do not include this; they compile
// what they use themselves.
#pragma once
#include "gemm.h"
#include "rows.h"

// For the number of rows of each micro-kernel.
#define AI3_ROWS_TO_4_(X, ...) X(1, __VA_ARGS__) X(2, __VA_ARGS__) X(3, __VA_ARGS__) X(4, __VA_ARGS__)
#define AI3_ROWS_TO_6_(X, ...) AI3_ROWS_TO_4_(X, __VA_ARGS__) X(5, __VA_ARGS__) X(6, __VA_ARGS__)
#define AI3_ROWS_TO_10_(X, ...) \
  AI3_ROWS_TO_6_(X, __VA_ARGS__) X(7, __VA_ARGS__) X(8, __VA_ARGS__) X(9, __VA_ARGS__) X(10, __VA_ARGS__)
#define AI3_ROWS_TO_14_(X, ...) \
  AI3_ROWS_TO_10_(X, __VA_ARGS__) X(11, __VA_ARGS__) X(12, __VA_ARGS__) X(13, __VA_ARGS__) X(14, __VA_ARGS__)
#if AI3_VECTOR_BYTES == 64
#define AI3_EACH_ROW_COUNT_ AI3_ROWS_TO_14_
#elif AI3_VECTOR_BYTES == 32
#define AI3_EACH_ROW_COUNT_ AI3_ROWS_TO_6_
#else
#define AI3_EACH_ROW_COUNT_ AI3_ROWS_TO_4_
#endif

// `EXTERN` is nothing in instances.cpp.
#define AI3_MICRO_KERNEL_(R, EXTERN, A, Rows, Stored, C)                                                                   \
  EXTERN template void called_micro_kernel<A, R, false, Rows, Stored, C>(Rows, const Stored*, int64_t, const Tile<A, C>&); \
  EXTERN template void called_micro_kernel<A, R, true, Rows, Stored, C>(Rows, const Stored*, int64_t, const Tile<A, C>&);
#define AI3_INSTANCES_OF_SUMS_(EXTERN, A)                                 \
  AI3_EACH_ROW_COUNT_(AI3_MICRO_KERNEL_, EXTERN, A, StridedRows<A>, A, A) \
  AI3_EACH_ROW_COUNT_(AI3_MICRO_KERNEL_, EXTERN, A, PanelRows<A>, A, A)   \
  EXTERN template Vec<A> activate_called<A>(Activation, Vec<A>, Vec<A>);
#define AI3_INSTANCES_OF_STORED_(EXTERN, T)                                                                                    \
  EXTERN template void store_block_as<false, T>(const Output<T>&, const Acc<T>*, int64_t, int64_t, int64_t);                   \
  EXTERN template void store_block_as<true, T>(const Output<T>&, const Acc<T>*, int64_t, int64_t, int64_t);                    \
  EXTERN template void gemm_block<T, StridedRows<Acc<T>>, Acc<T>>(const StridedRows<Acc<T>>&, int64_t, const Acc<T>*, int64_t, \
                                                                  int64_t, int64_t, const Output<T>&);                         \
  EXTERN template void pack_panels<T, Acc<T>>(const T*, int64_t, int64_t, int64_t, int64_t, Acc<T>*, int64_t);                 \
  EXTERN template void copy_rows<T>(const T*, int64_t, int64_t, int64_t, int64_t, Acc<T>*, int64_t);

#define AI3_INSTANCES_OF_FLOAT_(EXTERN) AI3_INSTANCES_OF_SUMS_(EXTERN, float) AI3_INSTANCES_OF_STORED_(EXTERN, float)
#ifdef AI3_ONLY_FLOAT32
#define AI3_INSTANCES_(EXTERN) AI3_INSTANCES_OF_FLOAT_(EXTERN)
#else
#define AI3_INSTANCES_(EXTERN)                                                               \
  AI3_INSTANCES_OF_FLOAT_(EXTERN)                                                            \
  AI3_EACH_ROW_COUNT_(AI3_MICRO_KERNEL_, EXTERN, float, PairRows, float, float)              \
  AI3_EACH_ROW_COUNT_(AI3_MICRO_KERNEL_, EXTERN, float, PairRows, float, bfloat16)           \
  AI3_EACH_ROW_COUNT_(AI3_MICRO_KERNEL_, EXTERN, float, StridedRows<float>, bfloat16, float) \
  AI3_INSTANCES_OF_STORED_(EXTERN, bfloat16)                                                 \
  AI3_INSTANCES_OF_STORED_(EXTERN, float16)                                                  \
  AI3_INSTANCES_OF_SUMS_(EXTERN, double)                                                     \
  AI3_INSTANCES_OF_STORED_(EXTERN, double)
#endif

namespace ai3::inline AI3_LEVEL {
#ifndef AI3_DEFINES_INSTANCES
AI3_INSTANCES_(extern)
#endif
}  // namespace ai3::inline AI3_LEVEL
