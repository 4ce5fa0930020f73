# GoogleTest and Google Benchmark: the system's, else a pinned download. Where there is neither, one sentence says what is left
# out, and the target does not exist: if(TARGET GTest::gtest_main) …, if(TARGET benchmark::benchmark) ….
function(ai3_find package target left_out url sha256)
  find_package(${package} QUIET)
  if(TARGET ${target})
    return()
  endif()
  set(archive ${CMAKE_BINARY_DIR}/_downloads/${package}.tar.gz)
  if(NOT EXISTS ${archive})
    file(DOWNLOAD ${url} ${archive}.part TIMEOUT 120 STATUS status)
    list(GET status 0 code)
    if(NOT code EQUAL 0)
      message(WARNING "${left_out}: ${package} is not installed and cannot be downloaded (${status}).")
      return()
    endif()
    file(RENAME ${archive}.part ${archive})
  endif()
  include(FetchContent)
  foreach(setting BENCHMARK_ENABLE_TESTING BENCHMARK_ENABLE_WERROR BENCHMARK_ENABLE_INSTALL INSTALL_GTEST)
    set(${setting} OFF CACHE BOOL "" FORCE)
  endforeach()
  FetchContent_Declare(${package} URL ${archive} URL_HASH SHA256=${sha256})
  FetchContent_MakeAvailable(${package})
endfunction()

if(AI3_BUILD_TESTS)
  enable_testing()
  ai3_find(GTest GTest::gtest_main "The C++ tests are left out"
           https://github.com/google/googletest/archive/refs/tags/v1.14.0.tar.gz
           8ad598c73ad796e0d8280b082cebd82a630d73e73cd3c70057938a6501bba5d7)
endif()
if(AI3_BUILD_BENCHMARKS)
  ai3_find(benchmark benchmark::benchmark "The microbenchmarks are left out"
           https://github.com/google/benchmark/archive/refs/tags/v1.7.1.tar.gz
           6430e4092653380d9dc4ccb45a1e2dc9259d581f4866dc0759713126056bc1d7)
endif()
