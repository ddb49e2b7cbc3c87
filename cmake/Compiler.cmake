# How everything is compiled and linked. What only some files need (SIMD instruction sets) they choose at run time.
# All targets have the same options, position independence included: a precompiled header serves only such.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/bin")
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Debug, Release, RelWithDebInfo or MinSizeRel" FORCE)
endif()

add_library(tessera_options INTERFACE)
target_compile_options(tessera_options INTERFACE -Wall -Wextra)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(tessera_options INTERFACE -Wno-restrict)  # g++ 12 sees overlaps in "literal" + std::string that are none
endif()
target_include_directories(tessera_options INTERFACE "${PROJECT_SOURCE_DIR}")

if(TESSERA_SANITIZE)
  # vptr would have to see the type information of libtorch's classes, which is not built for it. Not optimised, since clang
  # compiles that in a third of the time, and the tests wait for libtorch.
  add_compile_options(-O0 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=undefined)
  add_compile_options($<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)  # g++ warns of what its own instrumentation hides
  add_link_options(-fsanitize=address,undefined)
  add_library(tessera_sanitizer_defaults OBJECT "${PROJECT_SOURCE_DIR}/cmake/sanitizer_defaults.cpp")
endif()

find_program(TESSERA_CCACHE ccache)
if(TESSERA_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # What ccache wants to be told before it trusts a precompiled header; see "Precompiled headers" in its manual.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${TESSERA_CCACHE})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options(-fpch-preprocess)
  else()
    add_compile_options("SHELL:-Xclang -fno-pch-timestamp")
  endif()
endif()

# tessera_library(name sources...): a static library. One without sources is an archive without members.
function(tessera_library name)
  set(sources ${ARGN})
  if(NOT sources)
    file(TOUCH "${PROJECT_BINARY_DIR}/empty.cpp")
    set(sources "${PROJECT_BINARY_DIR}/empty.cpp")
  endif()
  add_library(${name} STATIC ${sources})
  target_link_libraries(${name} PUBLIC tessera_options)
endfunction()

# tessera_executable(name sources...)
function(tessera_executable name)
  add_executable(${name} ${ARGN})
  target_link_libraries(${name} PRIVATE tessera_options)
  if(TESSERA_SANITIZE)
    target_sources(${name} PRIVATE $<TARGET_OBJECTS:tessera_sanitizer_defaults>)
  endif()
endfunction()
