// What the sanitizers have to be told because libtorch is not instrumented. Linked into every program of a sanitized build,
// so that nobody has to set environment variables.

extern "C" const char* __asan_default_options() {
  // detect_odr_violation: the same inline variables live in libtorch and here.
  // detect_container_overflow: a vector that libtorch has grown keeps the annotations we gave it.
  return "detect_odr_violation=0:detect_container_overflow=0:detect_stack_use_after_return=1:strict_init_order=0";
}

extern "C" const char* __ubsan_default_options() { return "print_stacktrace=1"; }

extern "C" const char* __lsan_default_suppressions() {
  // Registries, thread pools and profilers that libtorch and OpenMP keep until the process ends.
  return "leak:libtorch_cpu\nleak:libtorch_python\nleak:libc10\nleak:libgomp\n";
}
