# Every library that is not ours, as a target. scripts/setup.sh installs what is missing.

find_package(Threads REQUIRED)
# Its configuration warns of the static profiler library, which is within libtorch_cpu and comes apart only in source builds.
set(CMAKE_MESSAGE_LOG_LEVEL ERROR)
find_package(Torch 2.11 REQUIRED)
unset(CMAKE_MESSAGE_LOG_LEVEL)

# libtorch with its parallel_for: that is a template, and serial in files compiled without OpenMP. One OpenMP run-time in the
# process, the one that libtorch itself loads: two would each start a thread for every core.
add_library(tessera_torch INTERFACE)
target_link_libraries(tessera_torch INTERFACE ${TORCH_LIBRARIES})
target_compile_definitions(tessera_torch INTERFACE NDEBUG)  # some of its classes have other members without, in Debug builds too
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  target_compile_options(tessera_torch INTERFACE -fopenmp)
  file(GLOB torch_gomp "${TORCH_INSTALL_PREFIX}/lib/libgomp*.so*" "${TORCH_INSTALL_PREFIX}/../torch.libs/libgomp*.so*")
  if(torch_gomp)
    list(GET torch_gomp 0 torch_gomp)
    target_link_libraries(tessera_torch INTERFACE "${torch_gomp}")
  else()
    target_link_libraries(tessera_torch INTERFACE gomp)
  endif()
else()
  message(STATUS "Not g++: kernels of this project run on one thread a rank (libtorch's OpenMP run-time is g++'s)")
endif()

# tessera_find(target header [libraries...])
function(tessera_find target header)
  string(MAKE_C_IDENTIFIER ${target} id)
  find_path(TESSERA_${id}_INCLUDE ${header})
  if(NOT TESSERA_${id}_INCLUDE)
    message(FATAL_ERROR "The header ${header} is missing. `make setup` installs the package that has it.")
  endif()
  add_library(${target} INTERFACE IMPORTED GLOBAL)
  target_include_directories(${target} SYSTEM INTERFACE "${TESSERA_${id}_INCLUDE}")
  foreach(library IN LISTS ARGN)
    find_library(TESSERA_lib_${library} ${library} REQUIRED)
    target_link_libraries(${target} INTERFACE "${TESSERA_lib_${library}}")
  endforeach()
endfunction()

tessera_find(hwy::library hwy/highway.h hwy)
tessera_find(xxhash::headers xxhash.h)
tessera_find(sentencepiece::library sentencepiece_processor.h sentencepiece sentencepiece_train)
tessera_find(nlohmann::headers nlohmann/json.hpp)
tessera_find(cli11::headers CLI/CLI.hpp)
tessera_find(tomlplusplus::headers toml++/toml.h)
