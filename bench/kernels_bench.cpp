/// The kernels against memory: nanoseconds per parameter, and GB/s of the bytes that must be read and written. Interleave
/// and repeat to compare: kernels_bench --benchmark_repetitions=7 --benchmark_enable_random_interleaving
/// --benchmark_report_aggregates_only.
#include <ATen/Parallel.h>
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "tessera/comm/sum_kernel.h"
#include "tessera/optim/adamw_kernel.h"

namespace tessera {
namespace {

constexpr int64_t kParameters = 1 << 23;  // no array fits a cache: what a training step sees

std::vector<float> random_floats(int64_t count, uint32_t seed, float low, float high) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<float> distribution(low, high);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = distribution(generator);
  return values;
}

/// `ranks` gradients of `element`, as sum_sources takes them.
struct Gradients {
  Gradients(int64_t ranks, Element element) {
    for (int64_t r = 0; r < ranks; ++r) {
      auto values = random_floats(kParameters, static_cast<uint32_t>(r), -1, 1);
      if (element != Element::float32) {
        const void* source[] = {values.data()};
        sum_sources({source, Element::float32}, 1.0, false, values.data(), element, kParameters);
      }
      arrays.push_back(std::move(values));
      sources.push_back(arrays.back().data());
    }
    from = {sources, element};
  }

  std::vector<std::vector<float>> arrays;
  std::vector<const void*> sources;
  SumSources from;
};

void report(benchmark::State& state, int64_t bytes_per_parameter) {
  const auto parameters = static_cast<double>(kParameters) * static_cast<double>(state.iterations());
  state.counters["GB/s"] =
      benchmark::Counter(parameters * static_cast<double>(bytes_per_parameter) * 1e-9, benchmark::Counter::kIsRate);
  state.counters["ns/parameter"] =
      benchmark::Counter(parameters * 1e-9, benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}

/// The yardstick: what memcpy reaches.
void copy(benchmark::State& state) {
  const auto from = random_floats(kParameters, 0, -1, 1);
  std::vector<float> to(from.size());
  for (auto _ : state) {
    std::memcpy(to.data(), from.data(), from.size() * sizeof(float));
    benchmark::ClobberMemory();
  }
  report(state, 8);
}

void sum(benchmark::State& state, int64_t ranks, Element element, bool in_place) {
  const Gradients gradients(ranks, element);
  std::vector<float> out(static_cast<size_t>(kParameters));
  void* to = in_place ? const_cast<void*>(gradients.sources[0]) : out.data();
  for (auto _ : state)
    benchmark::DoNotOptimize(
        sum_sources(gradients.from, 1.0 / static_cast<double>(ranks), false, to, Element::float32, kParameters));
  report(state, ranks * size_of(element) + 4);
}

void adamw(benchmark::State& state, int64_t ranks, Element working_element, Element gradient_element) {
  const Gradients gradients(ranks, gradient_element);
  auto master = random_floats(kParameters, 100, -1, 1);
  std::vector<float> exp_avg(master.size()), exp_avg_sq(master.size()), working(master.size());
  const bool separate = working_element != Element::float32;  // in fp32 the working parameters are the master
  const AdamWState where{.master = master.data(),
                         .exp_avg = exp_avg.data(),
                         .exp_avg_sq = exp_avg_sq.data(),
                         .element = Element::float32,
                         .working = separate ? working.data() : nullptr,
                         .working_element = working_element};
  AdamWStep step;
  step.gradient_scale = 1.0 / static_cast<double>(ranks);
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
