// A model built without memory takes its values from a safetensors file, of which each rank reads only its part.
// ./load_file [FILE | FOLDER | FILE.safetensors.index.json]; without an argument it writes a file first. On two ranks:
// tessera launch -n 2 -- ./load_file.
#include <torch/torch.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "tessera/tessera.h"

struct NetImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return out(torch::gelu(in(x))); }
  torch::nn::Linear in = register_module("in", torch::nn::Linear(64, 256));
  torch::nn::Linear out = register_module("out", torch::nn::Linear(256, 1));
};
TORCH_MODULE(Net);

// The format in a few lines: the length of the header, the header, and each tensor's bytes.
void write(const std::filesystem::path& path, const torch::nn::Module& module) {
  std::ostringstream header;
  std::string data;
  for (const auto& item : module.named_parameters()) {
    const auto values = item.value().detach().contiguous();
    header << (data.empty() ? "{" : ",") << '"' << item.key() << R"(":{"dtype":"F32","shape":)" << values.sizes()
           << R"(,"data_offsets":[)" << data.size() << ',' << data.size() + values.nbytes() << "]}";
    data.append(static_cast<const char*>(values.const_data_ptr()), values.nbytes());
  }
  header << '}';
  const uint64_t length = header.str().size();
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&length), sizeof length) << header.str() << data;
}

int main(int count, char** arguments) try {
  const auto world = tessera::World::from_env();
  const bool given = count > 1;
  // Ranks of one launcher have one parent.
  const std::filesystem::path path =
      given ? arguments[1]
            : (std::filesystem::temp_directory_path() / ("tessera-example-" + std::to_string(getppid()))).string();

  torch::manual_seed(0);  // the same initial values on all ranks, though they are replaced
  auto model = tessera::deferred([] { return Net(); });
  auto sharded = tessera::fully_shard(model, tessera::Mesh(world), {.placements = tessera::zero3()});
  auto& ranks = sharded.engine().communicator();
  if (!given && world.rank.value == 0) write(path, *Net());
  ranks.barrier("the file is written");

  const auto report = tessera::load_at_once(sharded, path);
  std::printf("rank %d of %d read %lld bytes of %lld tensors\n", world.rank.value, world.size,
              static_cast<long long>(report.read.value), static_cast<long long>(report.tensors));

  tessera::AdamW optimizer(sharded, {.lr = 1e-3});
  auto loss = model(torch::ones({8, 64})).pow(2).mean();
  loss.backward();
  optimizer.step();
  ranks.barrier("the file is read");
  if (!given && world.rank.value == 0) std::filesystem::remove(path);
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
