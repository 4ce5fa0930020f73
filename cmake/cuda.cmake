# ai3_ops/_C_cuda.so, from csrc/cuda. CMAKE_CUDA_COMPILER is given (setup.py finds it) or nvcc is on PATH; no GPU is needed.
# The CUDA runtime and libraries are shared, not static: they are the ones that torch has loaded already, so that the process has
# one CUDA runtime with one error state, and any minor version of torch's CUDA major will do.
enable_language(CUDA)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION) # CMake before 3.26 does not know that nvcc takes it
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_FLAGS_RELEASE "-O3")
set(CMAKE_CUDA_FLAGS_DEBUG "-O1 -g -lineinfo")
set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)
if(CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE})
endif()

# TORCH_CUDA_ARCH_LIST as torch's own extensions read it: "8.0 9.0+PTX". By default code for Ampere, whose 8.6
# and Ada's 8.9 run it too (compiled apart, they took two fifths of the time), Hopper and, where nvcc knows it, Blackwell as in
# workstations (12.0); for what is not there (10.0) or comes later, PTX of the newest two.
if(DEFINED ENV{TORCH_CUDA_ARCH_LIST} AND NOT "$ENV{TORCH_CUDA_ARCH_LIST}" STREQUAL "")
  string(REGEX MATCHALL "[^ ;,]+" asked "$ENV{TORCH_CUDA_ARCH_LIST}")
  set(AI3_CUDA_ARCHITECTURES)
  foreach(arch ${asked})
    if(NOT arch MATCHES "^([0-9]+)\\.([0-9][af]?)(\\+PTX)?$")
      message(FATAL_ERROR "TORCH_CUDA_ARCH_LIST: needs architectures such as 8.0 or 9.0+PTX, got ${arch}")
    endif()
    if(CMAKE_MATCH_3)
      list(APPEND AI3_CUDA_ARCHITECTURES ${CMAKE_MATCH_1}${CMAKE_MATCH_2})
    else()
      list(APPEND AI3_CUDA_ARCHITECTURES ${CMAKE_MATCH_1}${CMAKE_MATCH_2}-real)
    endif()
  endforeach()
else()
  set(AI3_CUDA_ARCHITECTURES 80-real 90)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
    list(APPEND AI3_CUDA_ARCHITECTURES 120)
  endif()
endif()

# cuBLAS comes with the toolkit, cuDNN beside it, else both with pip's nvidia packages (beside torch). As hints, which are searched
# before the system's directories, and the toolkit's own before pip's: headers and libraries of another version than nvcc's must
# not come first.
get_filename_component(AI3_TOOLKIT ${CMAKE_CUDA_COMPILER} REALPATH)
get_filename_component(AI3_TOOLKIT ${AI3_TOOLKIT}/../.. ABSOLUTE)
get_filename_component(AI3_SITE ${AI3_TORCH} DIRECTORY)
file(GLOB AI3_NVIDIA_INCLUDES ${AI3_SITE}/nvidia/*/include)
file(GLOB AI3_NVIDIA_LIBRARIES ${AI3_SITE}/nvidia/*/lib)
set(AI3_CUDA_LIBRARY_PATHS ${AI3_TOOLKIT}/lib64 ${AI3_TOOLKIT}/targets/x86_64-linux/lib ${AI3_TOOLKIT}/targets/sbsa-linux/lib
    ${AI3_NVIDIA_LIBRARIES})
function(ai3_cuda_library variable header)
  find_path(${variable}_INCLUDE ${header} HINTS ${AI3_TOOLKIT}/include ${AI3_NVIDIA_INCLUDES})
  find_library(${variable} NAMES ${ARGN} NAMES_PER_DIR HINTS ${AI3_CUDA_LIBRARY_PATHS})
  if(NOT ${variable} OR NOT ${variable}_INCLUDE)
    message(FATAL_ERROR "${header} and its library are neither in ${AI3_TOOLKIT} nor among pip's nvidia packages; "
                        "install them, or build the CPU part alone with USE_CUDA=0")
  endif()
endfunction()
ai3_cuda_library(AI3_CUDART cuda_runtime.h cudart libcudart.so.13 libcudart.so.12)
ai3_cuda_library(AI3_CUBLAS cublas_v2.h cublas libcublas.so.13 libcublas.so.12)
ai3_cuda_library(AI3_CUBLASLT cublasLt.h cublasLt libcublasLt.so.13 libcublasLt.so.12)
ai3_cuda_library(AI3_CUDNN cudnn.h cudnn libcudnn.so.9)
# One wheel serves torch 2.11 and later, which bring their own cuDNN: newer headers than the oldest's may name what that one lacks.
file(STRINGS ${AI3_CUDNN_INCLUDE}/cudnn_version.h version REGEX "#define CUDNN_(MAJOR|MINOR) ")
string(REGEX REPLACE "[^0-9;]" "" version "${version}")
list(JOIN version "." AI3_CUDNN_VERSION)
if(AI3_CUDNN_VERSION VERSION_GREATER 9.19)
  message(WARNING "cuDNN's headers are of ${AI3_CUDNN_VERSION}: a wheel for torch 2.11 needs 9.19 or earlier")
endif()

add_library(_C_cuda SHARED ${AI3_CUDA})
set_target_properties(_C_cuda PROPERTIES CUDA_ARCHITECTURES "${AI3_CUDA_ARCHITECTURES}")
# What `supports` compares a GPU with: machine code of each, and PTX. With the suffix a (9.0a) either is for that GPU alone, with f
# (10.0f) for those of its major version.
set(code)
foreach(arch ${AI3_CUDA_ARCHITECTURES})
  string(REGEX MATCH "^[0-9]+" number ${arch})
  if(arch MATCHES "^[0-9]+a")
    string(APPEND code "AI3_ONLY(${number})")
  elseif(arch MATCHES "-real$" OR arch MATCHES "^[0-9]+f")
    string(APPEND code "AI3_REAL(${number})")
  else()
    string(APPEND code "AI3_PTX(${number})")
  endif()
endforeach()
target_compile_definitions(_C_cuda PRIVATE AI3_LEVEL=cuda USE_CUDA AI3_CUDA_CODE=${code}
                           $<$<COMPILE_LANGUAGE:CXX>:AI3_ON_CUDA>)
target_include_directories(_C_cuda SYSTEM PRIVATE ${AI3_CUDART_INCLUDE} ${AI3_CUBLAS_INCLUDE} ${AI3_CUDNN_INCLUDE})
set(AI3_HOST_WERROR)
if(AI3_WERROR)
  set(AI3_HOST_WERROR ",-Werror")
endif()
# 177: nvcc does not know that a registry record, which nothing names, is [[gnu::used]].
target_compile_options(_C_cuda PRIVATE
  $<$<COMPILE_LANGUAGE:CXX>:${AI3_FLAGS}>
  "$<$<COMPILE_LANGUAGE:CUDA>:--extended-lambda;--diag-suppress=177;--expt-relaxed-constexpr;-Xcompiler=-fvisibility=hidden,-Wall,-Wextra${AI3_HOST_WERROR}>")
target_link_libraries(_C_cuda PRIVATE ai3_torch _C torch_cuda c10_cuda ${AI3_CUDART} ${AI3_CUBLAS} ${AI3_CUBLASLT} ${AI3_CUDNN})
ai3_package_library(_C_cuda)
list(JOIN AI3_CUDA_ARCHITECTURES " " architectures)
message(STATUS "CUDA: ${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_COMPILER_VERSION}, cuDNN ${AI3_CUDNN_VERSION}, architectures ${architectures}")
