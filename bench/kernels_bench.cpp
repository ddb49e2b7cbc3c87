/// The kernels against memory: nanoseconds per parameter, and GB/s of the bytes that must be read and written. To compare,
/// interleave and repeat: kernels_bench --benchmark_repetitions=7 --benchmark_enable_random_interleaving
/// --benchmark_report_aggregates_only.
#include <ATen/Parallel.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "tessera/comm/sum_kernel.h"
#include "tessera/optim/adamw_kernel.h"

namespace tessera {
namespace {

constexpr int64_t kParameters = 1 << 23;  // no array fits a cache: what a training step sees

/// `ranks` gradients of `element`, as sum_sources takes them.
struct Gradients {
  Gradients(int64_t ranks, Element element) {
    for (int64_t r = 0; r < ranks; ++r) {
      arrays.push_back(at::rand({kParameters}).to(element == Element::bfloat16 ? at::kBFloat16 : at::kFloat));
      sources.push_back(arrays.back().data_ptr());
    }
    from = {sources, element};
  }

  std::vector<at::Tensor> arrays;
  std::vector<const void*> sources;
  SumSources from;
};

void report(benchmark::State& state, int64_t bytes_per_parameter) {
  const auto giga = static_cast<double>(kParameters) * static_cast<double>(state.iterations()) * 1e-9;
  state.counters["GB/s"] = benchmark::Counter(giga * static_cast<double>(bytes_per_parameter), benchmark::Counter::kIsRate);
  state.counters["ns/parameter"] = benchmark::Counter(giga, benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}

/// A yardstick: what memcpy reaches.
void copy(benchmark::State& state) {
  const auto from = at::rand({kParameters}), to = at::rand({kParameters});
  for (auto _ : state) {
    std::memcpy(to.data_ptr(), from.data_ptr(), static_cast<size_t>(kParameters) * sizeof(float));
    benchmark::ClobberMemory();
  }
  report(state, 8);
}

void sum(benchmark::State& state, int64_t ranks, Element element, bool in_place) {
  const Gradients gradients(ranks, element);
  const auto out = in_place ? gradients.arrays[0] : at::zeros({kParameters});
  const double mean = 1.0 / static_cast<double>(ranks);
  for (auto _ : state)
    benchmark::DoNotOptimize(sum_sources(gradients.from, mean, false, out.data_ptr(), Element::float32, kParameters));
  report(state, ranks * size_of(element) + 4);
}

/// The other yardstick: the kernel behind Python's AdamW(fused=True), which takes one gradient and looks for nothing in it.
void torch_fused_adamw(benchmark::State& state) {
  const auto master = at::rand({kParameters}), gradient = at::rand({kParameters});
  const auto exp_avg = at::zeros({kParameters}), exp_avg_sq = at::zeros({kParameters}), step = at::scalar_tensor(1.0f);
  for (auto _ : state)
    at::_fused_adamw_({master}, {gradient}, {exp_avg}, {exp_avg_sq}, {}, {step}, 1e-3, 0.9, 0.999, 0.01, 1e-8, false, false);
  report(state, 28);
}

void adamw(benchmark::State& state, int64_t ranks, Element working_element, Element gradient_element) {
  const Gradients gradients(ranks, gradient_element);
  const auto master = at::rand({kParameters});
  const auto exp_avg = at::zeros({kParameters}), exp_avg_sq = at::zeros({kParameters}), working = at::zeros({kParameters});
  const bool separate = working_element != Element::float32;  // in fp32 the working parameters are the master
  const AdamWState where{.master = master.data_ptr(),
                         .exp_avg = exp_avg.data_ptr(),
                         .exp_avg_sq = exp_avg_sq.data_ptr(),
                         .element = Element::float32,
                         .moment_element = Element::float32,
                         .working = separate ? working.data_ptr() : nullptr,
                         .working_element = working_element};
  AdamWStep step{.gradient_scale = 1.0 / static_cast<double>(ranks)};
  for (auto _ : state) {
    benchmark::DoNotOptimize(adamw_update(gradients.from, step, where, kParameters));
    ++step.step;
  }
  report(state, 24 + ranks * size_of(gradient_element) + (separate ? size_of(working_element) : 0));
}

/// With repetitions, the best is what the machine can do (neighbours only ever slow down): the least time, the most GB/s.
void best(benchmark::internal::Benchmark* bench) {
  bench->ComputeStatistics("min", [](const std::vector<double>& values) { return std::ranges::min(values); });
  bench->ComputeStatistics("max", [](const std::vector<double>& values) { return std::ranges::max(values); });
}

BENCHMARK(copy)->Apply(best);
BENCHMARK_CAPTURE(sum, copy_fp32, 1, Element::float32, false)->Apply(best);
BENCHMARK_CAPTURE(sum, two_fp32, 2, Element::float32, false)->Apply(best);
BENCHMARK_CAPTURE(sum, two_fp32_in_place, 2, Element::float32, true)->Apply(best);
BENCHMARK_CAPTURE(sum, eight_fp32, 8, Element::float32, false)->Apply(best);
BENCHMARK_CAPTURE(sum, two_bf16, 2, Element::bfloat16, false)->Apply(best);
BENCHMARK(torch_fused_adamw)->Apply(best);
BENCHMARK_CAPTURE(adamw, one_fp32, 1, Element::float32, Element::float32)->Apply(best);
BENCHMARK_CAPTURE(adamw, two_fp32, 2, Element::float32, Element::float32)->Apply(best);
BENCHMARK_CAPTURE(adamw, one_fp32_working_bf16, 1, Element::bfloat16, Element::float32)->Apply(best);
BENCHMARK_CAPTURE(adamw, two_bf16_working_bf16, 2, Element::bfloat16, Element::bfloat16)->Apply(best);

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  at::set_num_threads(1);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
