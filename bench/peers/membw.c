// What memory itself can do, to hold the kernels against. cc -O2 -o membw membw.c
//   membw stream BYTES_PER_ARRAY REPEATS PROCESSES
//     copy (a = b) and triad (a = b + s c), with plain and with non-temporal stores, and memcpy, in processes that start
//     together. GB/s counts as STREAM does (copy 2 arrays, triad 3), without what a write must read first; the sum of all
//     processes' rates.
//   membw shm BYTES REPEATS
//     two processes over one shared memory segment: read = one copies out what the other wrote; pipe = a one-way ring of
//     slots (copy in, copy out); xchg = both write their buffer in, meet, and read the other's, as an all-gather does.
// Prints each repeat; the reader takes minimum or median.
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

// Four floats are a vector everywhere; what is bound by memory gains nothing from longer ones.
typedef float Four __attribute__((vector_size(16)));

#if defined(__SSE2__)
#include <emmintrin.h>
static void store_past_caches(Four* to, Four value) { _mm_stream_ps((float*)to, value); }
static void end_of_stores(void) { _mm_sfence(); }
static void relax(void) { _mm_pause(); }
#else  // without such stores the figures of copy_nt and triad_nt are those of plain ones
static void store_past_caches(Four* to, Four value) { *to = value; }
static void end_of_stores(void) {}
static void relax(void) {}
#endif

enum { kMaxProcesses = 8, kMaxRepeats = 64, kKinds = 5 };

typedef struct {
  _Atomic int count, generation;
  _Atomic uint64_t head, tail;
} Control;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void pause_after(int spins) {
  if (spins > 200) {
    sched_yield();
  } else {
    relax();
  }
}

static void barrier(Control* control, int processes) {
  if (processes == 1) return;
  const int generation = atomic_load(&control->generation);
  if (atomic_fetch_add(&control->count, 1) == processes - 1) {
    atomic_store(&control->count, 0);
    atomic_fetch_add(&control->generation, 1);
  } else {
    for (int i = 0; atomic_load(&control->generation) == generation; i++) pause_after(i);
  }
}

static void* pages(size_t bytes, int shared) {
  void* p = mmap(0, bytes, PROT_READ | PROT_WRITE, (shared ? MAP_SHARED : MAP_PRIVATE) | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) {
    perror("mmap");
    exit(1);
  }
  if (!shared && getenv("MEMBW_THP")) madvise(p, bytes, MADV_HUGEPAGE);
  return p;
}

#define KERNEL __attribute__((noinline)) static void

KERNEL copy(Four* a, const Four* b, size_t n) {
  for (size_t i = 0; i < n; i++) {
    a[i] = b[i];
    __asm__ volatile("" ::: "memory");  // or it becomes a call of memcpy
  }
}
KERNEL copy_nt(Four* a, const Four* b, size_t n) {
  for (size_t i = 0; i < n; i++) store_past_caches(a + i, b[i]);
  end_of_stores();
}
KERNEL triad(Four* a, const Four* b, const Four* c, float s, size_t n) {
  for (size_t i = 0; i < n; i++) a[i] = b[i] + s * c[i];
}
KERNEL triad_nt(Four* a, const Four* b, const Four* c, float s, size_t n) {
  for (size_t i = 0; i < n; i++) store_past_caches(a + i, b[i] + s * c[i]);
  end_of_stores();
}

static void run_kernel(int kind, Four* a, const Four* b, const Four* c, size_t n) {
  switch (kind) {
    case 0:
      copy(a, b, n);
      break;
    case 1:
      copy_nt(a, b, n);
      break;
    case 2:
      triad(a, b, c, 3, n);
      break;
    case 3:
      triad_nt(a, b, c, 3, n);
      break;
    default:
      memcpy(a, b, n * sizeof(Four));
      break;
  }
}

static void stream(size_t bytes, int repeats, int processes) {
  static const char* const names[kKinds] = {"copy", "copy_nt", "triad", "triad_nt", "memcpy"};
  static const double arrays[kKinds] = {2, 2, 3, 3, 2};
  Control* control = pages(sizeof(Control), 1);
  double(*rates)[kKinds][kMaxProcesses] = pages(sizeof(double[kMaxRepeats][kKinds][kMaxProcesses]), 1);
  int me = 0;
  for (int i = 1; i < processes; i++) {
    if (fork() == 0) {
      me = i;
      break;
    }
  }
  const size_t n = bytes / sizeof(Four);
  Four *a = pages(bytes, 0), *b = pages(bytes, 0), *c = pages(bytes, 0);
  for (size_t i = 0; i < n; i++) a[i] = (Four){0}, b[i] = (Four){1, 1, 1, 1}, c[i] = (Four){2, 2, 2, 2};
  for (int r = -1; r < repeats; r++) {  // the first warms up
    for (int kind = 0; kind < kKinds; kind++) {
      barrier(control, processes);
      const double start = now();
      run_kernel(kind, a, b, c, n);
      const double spent = now() - start;
      if (r >= 0) rates[r][kind][me] = arrays[kind] * (double)bytes / spent / 1e9;
      barrier(control, processes);
    }
  }
  if (me) _exit(0);
  while (wait(0) > 0) continue;
  for (int kind = 0; kind < kKinds; kind++) {
    printf("%s", names[kind]);
    for (int r = 0; r < repeats; r++) {
      double sum = 0;
      for (int p = 0; p < processes; p++) sum += rates[r][kind][p];
      printf(" %.3f", sum);
    }
    printf("\n");
  }
}

typedef struct {
  Control* control;
  int me;
  char *segment, *mine, *in;
  size_t bytes;
} Pair;

// One process copies out what the other wrote. Returns GB/s on process 1.
static double read_out(Pair* pair) {
  if (!pair->me) memcpy(pair->segment, pair->mine, pair->bytes);
  barrier(pair->control, 2);
  const double start = now();
  if (pair->me) memcpy(pair->in, pair->segment, pair->bytes);
  const double spent = now() - start;
  barrier(pair->control, 2);
  return (double)pair->bytes / spent / 1e9;
}

static double through_ring(Pair* pair) {
  const size_t slot = 256 << 10, slots = 4;
  Control* control = pair->control;
  if (!pair->me) {
    atomic_store(&control->head, 0);
    atomic_store(&control->tail, 0);
  }
  barrier(control, 2);
  const double start = now();
  for (size_t i = 0; i < pair->bytes / slot; i++) {
    char* at = pair->segment + (i % slots) * slot;
    if (!pair->me) {
      for (int k = 0; i - atomic_load_explicit(&control->tail, memory_order_acquire) >= slots; k++) pause_after(k);
      memcpy(at, pair->mine + i * slot, slot);
      atomic_store_explicit(&control->head, i + 1, memory_order_release);
    } else {
      for (int k = 0; atomic_load_explicit(&control->head, memory_order_acquire) <= i; k++) pause_after(k);
      memcpy(pair->in + i * slot, at, slot);
      atomic_store_explicit(&control->tail, i + 1, memory_order_release);
    }
  }
  barrier(control, 2);
  return (double)pair->bytes / (now() - start) / 1e9;
}

static double exchange(Pair* pair) {
  barrier(pair->control, 2);
  const double start = now();
  memcpy(pair->segment + (size_t)pair->me * pair->bytes, pair->mine, pair->bytes);
  barrier(pair->control, 2);
  memcpy(pair->in, pair->segment + (size_t)(1 - pair->me) * pair->bytes, pair->bytes);
  barrier(pair->control, 2);
  return (double)pair->bytes / (now() - start) / 1e9;
}

static void shm(size_t bytes, int repeats) {
  static const char* const names[3] = {"read", "pipe", "xchg"};
  double(*rates)[kMaxRepeats] = pages(sizeof(double[3][kMaxRepeats]), 1);
  Pair pair = {.control = pages(sizeof(Control), 1), .segment = pages(2 * bytes, 1), .bytes = bytes};
  pair.me = fork() == 0;
  pair.mine = pages(bytes, 0);
  pair.in = pages(bytes, 0);
  memset(pair.mine, pair.me + 1, bytes);
  memset(pair.in, 0, bytes);
  memset(pair.segment + (size_t)pair.me * bytes, 7, bytes);
  for (int r = -1; r < repeats; r++) {
    const double seen[3] = {read_out(&pair), through_ring(&pair), exchange(&pair)};
    for (int kind = 0; pair.me && r >= 0 && kind < 3; kind++) rates[kind][r] = seen[kind];
    if (pair.in[bytes / 2] != 2 - pair.me) {
      fprintf(stderr, "membw: wrong data\n");
      exit(2);
    }
  }
  if (pair.me) _exit(0);
  wait(0);
  for (int kind = 0; kind < 3; kind++) {
    printf("%s", names[kind]);
    for (int r = 0; r < repeats; r++) printf(" %.3f", rates[kind][r]);
    printf("\n");
  }
}

int main(int count, char** words) {
  const size_t bytes = count > 2 ? strtoull(words[2], 0, 0) / 4096 * 4096 : 0;
  const int repeats = count > 3 ? atoi(words[3]) : 0, processes = count > 4 ? atoi(words[4]) : 1;
  const int sane = bytes > 0 && repeats > 0 && repeats <= kMaxRepeats && processes > 0 && processes <= kMaxProcesses;
  if (count == 5 && sane && !strcmp(words[1], "stream")) {
    stream(bytes, repeats, processes);
  } else if (count == 4 && sane && !strcmp(words[1], "shm")) {
    shm(bytes, repeats);
  } else {
    fprintf(stderr, "membw stream BYTES REPEATS PROCESSES (at most %d) | membw shm BYTES REPEATS (at most %d)\n",
            kMaxProcesses, kMaxRepeats);
    return 1;
  }
  return 0;
}
