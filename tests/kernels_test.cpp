#include <ATen/Parallel.h>
#include <ATen/ops/_fused_adamw.h>
#include <gtest/gtest.h>
#include <hwy/highway.h>
#include <torch/optim/adamw.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "tessera/comm/sum_kernel.h"
#include "tessera/optim/adamw_kernel.h"
#include "tests/support/element_array.h"

namespace tessera {
namespace {

constexpr Element kElements[] = {Element::float32, Element::float64, Element::bfloat16, Element::float16};

std::vector<const void*> addresses(const std::vector<Array>& arrays, int64_t i = 0) {
  std::vector<const void*> addresses;
  for (const Array& array : arrays) addresses.push_back(array.at(i));
  return addresses;
}

std::vector<Array> random_arrays(int64_t ranks, Element element, int64_t count, std::mt19937_64& generator) {
  std::vector<Array> arrays;
  for (int64_t r = 0; r < ranks; ++r) arrays.push_back(Array::random(element, count, generator, r));
  return arrays;
}

SumResult sum(const std::vector<Array>& sources, Element element, double scale, bool accumulate, Array& out) {
  return sum_sources({addresses(sources), element}, scale, accumulate, out.at(0), out.element(), out.count());
}

/// What sum_sources promises, one element after another.
template <class C>
double sum_plainly(const std::vector<Array>& sources, double scale, bool accumulate, Array& out) {
  double squares = 0;
  for (int64_t i = 0; i < out.count(); ++i) {
    C total = sources.empty() ? C(0) : static_cast<C>(sources[0][i]);
    for (size_t r = 1; r < sources.size(); ++r) total += static_cast<C>(sources[r][i]);
    total *= static_cast<C>(scale);
    if (accumulate) total += static_cast<C>(out[i]);
    write(out.at(i), out.element(), total);
    squares += out[i] * out[i];
  }
  return squares;
}

/// Runs `check` on every SIMD target that this CPU has.
template <class Check>
void on_every_target(const Check& check) {
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    SCOPED_TRACE(hwy::TargetName(target));
    hwy::SetSupportedTargetsForTest(target);
    check();
  }
  hwy::SetSupportedTargetsForTest(0);
}

TEST(SumKernel, EqualsTheScalarSumOnEveryTarget) {
  const auto seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 generator(seed);
  for (int round = 0; round < 400; ++round) {
    const Element in = kElements[generator() % 4], to = kElements[generator() % 4];
    const bool in_double = in == Element::float64 || to == Element::float64;
    if (in_double && size_of(to) == 2) continue;  // rounding doubles once: the next test
    const int64_t ranks = static_cast<int64_t>(generator() % 9),
                  count = static_cast<int64_t>(generator() % (round % 2 ? 200 : 5001));
    const double scale = generator() % 2 ? 1.0 : 1.0 / 3;
    const bool accumulate = generator() % 2;
    SCOPED_TRACE(testing::Message() << "round " << round << ": " << ranks << " ranks, " << count << " elements of kind "
                                    << int(in) << " to " << int(to));
    const auto sources = random_arrays(ranks, in, count, generator);
    const Array before = Array::random(to, count, generator, round % 7);
    Array expected = before;
    const double squares = in_double ? sum_plainly<double>(sources, scale, accumulate, expected)
                                     : sum_plainly<float>(sources, scale, accumulate, expected);
    std::vector<double> found;
    on_every_target([&] {
      Array out = before;
      found.push_back(sum(sources, in, scale, accumulate, out).squares);
      EXPECT_EQ(out, expected);
      EXPECT_EQ(found.back(), found.front());
      EXPECT_NEAR(found.back(), squares, 1e-12 * squares);
    });
    if (HasFailure()) return;
  }
}

TEST(SumKernel, RoundsDoublesToSixteenBitsOnce) {
  std::mt19937_64 generator(7);
  for (const Element to : {Element::bfloat16, Element::float16}) {
    const int kept = to == Element::bfloat16 ? 8 : 11;  // bits of the significand
    Array source(Element::float64, 4000), out(to, 4000);
    for (int64_t i = 0; i < source.count(); ++i) {
      // Halfway between two neighbours, and a little more or less than a float can say.
      const double unit = std::ldexp(1.0, 1 - kept),
                   halfway = 1 + (static_cast<double>(generator() % (1u << (kept - 1))) + 0.5) * unit;
      write(source.at(i), Element::float64,
            halfway + static_cast<double>(static_cast<int64_t>(generator() % 3) - 1) * 0x1p-50);
    }
    on_every_target([&] {
      sum({source}, Element::float64, 1.0, false, out);
      for (int64_t i = 0; i < source.count(); ++i)  // rint rounds the significand, scaled to an integer, to even
        ASSERT_EQ(out[i], std::ldexp(std::rint(std::ldexp(source[i], kept - 1)), 1 - kept)) << source[i];
    });
  }
}

TEST(SumKernel, ConvertsEverySixteenBitPatternAndEveryKindOfFloat) {
  on_every_target([] {
    for (const Element element : {Element::bfloat16, Element::float16}) {
      Array bits(element, 1 << 16), floats(Element::float32, 1 << 16), back(element, 1 << 16);
      for (uint32_t i = 0; i < 1u << 16; ++i) std::memcpy(bits.at(i), &i, 2);
      sum({bits}, element, 1.0, false, floats);
      sum({floats}, Element::float32, 1.0, false, back);
      for (int64_t i = 0; i < bits.count(); ++i) {
        if (std::isnan(bits[i])) {
          ASSERT_TRUE(std::isnan(floats[i]) && std::isnan(back[i])) << i;
        } else {
          ASSERT_EQ(floats[i], bits[i]) << i;
          ASSERT_EQ(std::memcmp(back.at(i), bits.at(i), 2), 0) << i;
        }
      }
      // Patterns of floats: every exponent with significands on, beside and away from the halfway points; both signs.
      std::mt19937 generator(11);
      Array any(Element::float32, 1 << 18), out(element, 1 << 18);
      for (int64_t i = 0; i < any.count(); ++i) {
        const uint32_t kinds[] = {0, 0x7FFF, 0x8000, 0x8001, 0x0FFF, 0x1000, 0x1001, static_cast<uint32_t>(generator())};
        const uint32_t word = (static_cast<uint32_t>(generator()) & 0xFFFF0000u) ^ kinds[i % 8];
        std::memcpy(any.at(i), &word, 4);
      }
      sum({any}, Element::float32, 1.0, false, out);
      Array expected(element, any.count());
      for (int64_t i = 0; i < any.count(); ++i) {
        write(expected.at(i), element, any[i]);
        if (std::isnan(any[i])) {
          ASSERT_TRUE(std::isnan(out[i])) << i;
        } else {
          ASSERT_EQ(std::memcmp(out.at(i), expected.at(i), 2), 0) << any[i];
        }
      }
    }
  });
}

TEST(SumKernel, WritesOverASource) {
  std::mt19937_64 generator(3);
  for (const Element element : kElements) {
    for (const size_t overwritten : {0u, 2u}) {
      auto sources = random_arrays(3, element, 3001, generator);
      Array expected(element, 3001);
      sum(sources, element, 0.5, false, expected);
      sum_sources({addresses(sources), element}, 0.5, false, sources[overwritten].at(0), element, 3001);
      for (int64_t i = 0; i < expected.count(); ++i) ASSERT_EQ(sources[overwritten][i], expected[i]);
    }
  }
}

TEST(SumKernel, SaysThatAnElementIsNotFinite) {
  std::mt19937_64 generator(5);
  for (const double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    for (const Element element : kElements) {
      auto sources = random_arrays(2, element, 2500, generator);
      Array out(element, 2500);
      EXPECT_TRUE(std::isfinite(sum(sources, element, 1.0, false, out).squares));
      write(sources[1].at(2499), element, bad);
      EXPECT_FALSE(std::isfinite(sum(sources, element, 1.0, false, out).squares));
    }
  }
}

TEST(SumKernel, DependsNeitherOnThreadsNorOnCuts) {
  const int threads = at::get_num_threads();
  const auto seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 generator(seed);
  for (const Element to : {Element::float32, Element::bfloat16}) {
    constexpr int64_t count = 700'001;  // more than ten chunks, and enough to be written past the caches
    const auto sources = random_arrays(2, Element::float32, count, generator);
    at::set_num_threads(1);
    Array one(to, count, 3), several = one, cut = one;
    const double squares = sum(sources, Element::float32, 0.5, false, one).squares;
    at::set_num_threads(3);
    EXPECT_EQ(sum(sources, Element::float32, 0.5, false, several).squares, squares);
    EXPECT_EQ(several, one);
    for (int64_t i = 0, n; i < count; i += n) {
      n = std::min<int64_t>(count - i, 1 + static_cast<int64_t>(generator() % 20'000));
      sum_sources({addresses(sources, i), Element::float32}, 0.5, false, cut.at(i), to, n);
    }
    EXPECT_EQ(cut, one);
  }
  at::set_num_threads(threads);
}

/// AdamW's state beside what the kernel may write.
struct Optimizer {
  Optimizer(Element element, int64_t count, std::mt19937_64& generator, Element working_element)
      : Optimizer(element, count, generator, working_element, element) {}
  Optimizer(Element element, int64_t count, std::mt19937_64& generator, Element working_element, Element moment_element)
      : master(Array::random(element, count, generator, 1)),
        exp_avg(moment_element, count, 2),
        exp_avg_sq(moment_element, count, 3),
        working(working_element, count, 1),
        gradient_sum(element, count, 0) {}

  SumResult update(const std::vector<Array>& gradients, const AdamWStep& step, int64_t begin, int64_t count) {
    const AdamWState state{.master = master.at(begin),
                           .exp_avg = exp_avg.at(begin),
                           .exp_avg_sq = exp_avg_sq.at(begin),
                           .element = master.element(),
                           .moment_element = exp_avg.element(),
                           .working = working.at(begin),
                           .working_element = working.element(),
                           .gradient_sum = gradient_sum.at(begin),
                           .gradient_element = gradient_sum.element()};
    return adamw_update({addresses(gradients, begin), gradients[0].element()}, step, state, count);
  }
  SumResult update(const std::vector<Array>& gradients, const AdamWStep& step) {
    return update(gradients, step, 0, master.count());
  }
  bool operator==(const Optimizer&) const = default;

  Array master, exp_avg, exp_avg_sq, working, gradient_sum;
};

at::Tensor tensor(const Array& array) {
  return at::from_blob(const_cast<std::byte*>(array.at(0)), {array.count()},
                       array.element() == Element::float64 ? at::kDouble : at::kFloat)
      .clone();
}

/// A hundred steps of torch::optim::AdamW, of the fused kernel behind Python's AdamW(fused=True), and of ours, on the same
/// gradients. Theirs are not bit-equal to each other: torch's sqrt (MKL) is not correctly rounded, the fused kernel's first
/// moment is a lerp.
void compare_with_torch(Element element, double weight_decay) {
  constexpr int64_t count = 1003;
  std::mt19937_64 generator(17);
  Optimizer ours(element, count, generator, Element::bfloat16);
  auto plain = tensor(ours.master).set_requires_grad(true), fused = tensor(ours.master);
  auto fused_exp_avg = at::zeros_like(fused), fused_exp_avg_sq = at::zeros_like(fused);
  torch::optim::AdamW optimizer({plain}, torch::optim::AdamWOptions(3e-3).betas({0.9, 0.95}).weight_decay(weight_decay));
  for (int64_t step = 1; step <= 100; ++step) {
    const auto gradients = random_arrays(1, element, count, generator);
    const auto gradient = tensor(gradients[0]);
    ours.update(gradients, {.lr = 3e-3, .beta1 = 0.9, .beta2 = 0.95, .weight_decay = weight_decay, .step = step});
    plain.mutable_grad() = gradient;
    optimizer.step();
    at::_fused_adamw_({fused}, {gradient}, {fused_exp_avg}, {fused_exp_avg_sq}, {},
                      {at::scalar_tensor(double(step), at::kFloat)}, 3e-3, 0.9, 0.95, weight_decay, 1e-8, /*amsgrad=*/false,
                      /*maximize=*/false);
  }
  const auto& state = static_cast<const torch::optim::AdamWParamState&>(*optimizer.state().begin()->second);
  const double tolerance =
      8 * (element == Element::float32 ? std::numeric_limits<float>::epsilon() : std::numeric_limits<double>::epsilon());
  const auto expect_near = [&](const Array& found, const at::Tensor& wanted) {
    EXPECT_TRUE(at::allclose(tensor(found), wanted, tolerance, tolerance));
  };
  expect_near(ours.master, plain.detach());
  expect_near(ours.exp_avg, state.exp_avg());
  expect_near(ours.exp_avg_sq, state.exp_avg_sq());
  expect_near(ours.master, fused);
  expect_near(ours.exp_avg, fused_exp_avg);
  expect_near(ours.exp_avg_sq, fused_exp_avg_sq);
}

TEST(AdamWKernel, EqualsTorchOverAHundredSteps) {
  on_every_target([] { compare_with_torch(Element::float32, 0.1); });
  compare_with_torch(Element::float32, 0.0);
  compare_with_torch(Element::float64, 0.1);
}

TEST(AdamWKernel, IsTheSumThenTheUpdateOnEveryTarget) {
  std::mt19937_64 generator(19);
  for (const Element in : kElements) {
    for (const Element working : kElements) {
      const Element element = in == Element::float64 || working == Element::float64 ? Element::float64 : Element::float32;
      const AdamWStep step{.step = 3, .gradient_scale = 0.25}, unscaled{.step = 3};
      const Optimizer start(element, 4133, generator, working);
      const auto gradients = random_arrays(3, in, start.master.count(), generator);
      on_every_target([&] {
        Optimizer fused = start, apart = start;
        std::vector<Array> summed{Array(element, start.master.count())};
        const double squares = sum(gradients, in, step.gradient_scale, false, summed[0]).squares;
        EXPECT_EQ(fused.update(gradients, step).squares, squares);
        apart.update(summed, unscaled);
        EXPECT_EQ(fused, apart);
        EXPECT_NE(fused.master, start.master);
        std::vector<Array> master{fused.master};
        Array rounded(working, start.master.count());
        sum(master, element, 1.0, false, rounded);
        EXPECT_EQ(fused.working, rounded);
      });
    }
  }
}

/// Each step is the step with whole moments, which are rounded afterwards.
TEST(AdamWKernel, RoundsNarrowMomentsAfterEachStepOnEveryTarget) {
  std::mt19937_64 generator(23);
  constexpr int64_t count = 1511;
  for (const Element element : {Element::float32, Element::float64}) {
    const Optimizer start(element, count, generator, Element::float16, Element::bfloat16);
    std::vector<std::vector<Array>> gradients;
    for (int step = 0; step < 5; ++step) gradients.push_back(random_arrays(2, Element::float16, count, generator));
    on_every_target([&] {
      Optimizer narrow = start, whole(element, count, generator, Element::float16);
      for (int64_t i = 0; i < count; ++i) write(whole.master.at(i), element, start.master[i]);
      for (int64_t step = 1; step <= 5; ++step) {
        const auto& now = gradients[static_cast<size_t>(step - 1)];
        narrow.update(now, {.step = step, .gradient_scale = 0.5});
        whole.update(now, {.step = step, .gradient_scale = 0.5});
        for (auto* moments : {&whole.exp_avg, &whole.exp_avg_sq}) {
          Array rounded(Element::bfloat16, count);
          sum({*moments}, element, 1.0, false, rounded);
          for (int64_t i = 0; i < count; ++i) write(moments->at(i), element, rounded[i]);
        }
      }
      EXPECT_EQ(narrow.master, whole.master);
      EXPECT_EQ(narrow.working, whole.working);
      for (int64_t i = 0; i < count; ++i) {
        ASSERT_EQ(narrow.exp_avg[i], whole.exp_avg[i]);
        ASSERT_EQ(narrow.exp_avg_sq[i], whole.exp_avg_sq[i]);
      }
    });
  }
}

TEST(AdamWKernel, DependsNeitherOnThreadsNorOnCuts) {
  const int threads = at::get_num_threads();
  const auto seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 generator(seed);
  constexpr int64_t count = 600'011;
  const AdamWStep step{.gradient_scale = 0.5};
  Optimizer one(Element::float32, count, generator, Element::bfloat16), several = one, cut = one;
  const auto gradients = random_arrays(2, Element::bfloat16, count, generator);
  at::set_num_threads(1);
  const double squares = one.update(gradients, step).squares;
  at::set_num_threads(4);
  EXPECT_EQ(several.update(gradients, step).squares, squares);
  EXPECT_EQ(several, one);
  for (int64_t i = 0, n; i < count; i += n) {
    n = std::min<int64_t>(count - i, 1 + static_cast<int64_t>(generator() % (i < 40'000 ? 300 : 90'000)));
    cut.update(gradients, step, i, n);
  }
  EXPECT_EQ(cut, one);
  at::set_num_threads(threads);
}

TEST(AdamWKernel, LeavesABlockWithANonFiniteGradientAsItWas) {
  std::mt19937_64 generator(29);
  for (const Element element : {Element::float32, Element::float64}) {
    const Optimizer start(element, 3 * 512, generator, Element::bfloat16);
    auto gradients = random_arrays(1, element, start.master.count(), generator);
    Optimizer good = start, bad = start;
    good.update(gradients, {});
    write(gradients[0].at(512 + 77), element, -std::numeric_limits<double>::infinity());
    EXPECT_FALSE(std::isfinite(bad.update(gradients, {}).squares));
    for (int64_t i = 0; i < start.master.count(); ++i) {
      const Optimizer& expected = i / 512 == 1 ? start : good;
      ASSERT_EQ(bad.master[i], expected.master[i]) << i;
      ASSERT_EQ(bad.exp_avg[i], expected.exp_avg[i]) << i;
      ASSERT_EQ(bad.exp_avg_sq[i], expected.exp_avg_sq[i]) << i;
      ASSERT_EQ(bad.working[i], expected.working[i]) << i;
      ASSERT_EQ(bad.gradient_sum[i], gradients[0][i]) << i;
    }
  }
}

TEST(AdamWKernel, TakesFiniteGradientsWhoseSquaresOverflow) {
  std::mt19937_64 generator(31);
  Optimizer optimizer(Element::float64, 100, generator, Element::float64);
  const double before = optimizer.master[7];
  std::vector<Array> gradients{Array(Element::float64, 100)};
  write(gradients[0].at(50), Element::float64, 1e200);
  write(gradients[0].at(7), Element::float64, 1.0);
  optimizer.update(gradients, {});
  EXPECT_NE(optimizer.master[7], before);
}

}  // namespace
}  // namespace tessera
