#include "tessera/storage/memory_limit.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "tessera/base/error.h"
#include "tessera/base/types.h"

namespace tessera {
namespace {

class MemoryLimit : public testing::Test {
 protected:
  MemoryLimit() {
    std::string name = testing::TempDir() + "/memory_limit_XXXXXX";
    root = mkdtemp(name.data());
  }
  ~MemoryLimit() override { std::filesystem::remove_all(root); }
  void write(const std::string& file, const std::string& contents) const {
    const std::filesystem::path path = root + file;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << contents;
  }
  std::string root;
};

TEST_F(MemoryLimit, IsThePhysicalMemoryWhenNothingLimits) {
  const Bytes physical = memory_limit(root);
  EXPECT_GT(physical, Bytes{64 << 20});
  write("/proc/self/cgroup", "0::/a/b\n");
  write("/sys/fs/cgroup/a/b/memory.max", "max\n");
  write("/sys/fs/cgroup/memory.max", "9223372036854771712\n");
  EXPECT_EQ(memory_limit(root), physical);
}

TEST_F(MemoryLimit, IsTheLeastOfTheGroupsAbove) {
  write("/proc/self/cgroup", "0::/a/b\n");
  write("/sys/fs/cgroup/a/b/memory.max", "max\n");
  write("/sys/fs/cgroup/a/memory.max", "1000000\n");
  write("/sys/fs/cgroup/memory.max", "2000000\n");
  EXPECT_EQ(memory_limit(root), Bytes{1000000});
}

TEST_F(MemoryLimit, ReadsVersionOneAndContainersWithoutTheirPath) {
  write("/proc/self/cgroup", "12:cpu,cpuacct:/\n4:memory:/docker/0123\n0::/\n");
  write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "3000000\n");
  EXPECT_EQ(memory_limit(root), Bytes{3000000});
}

TEST_F(MemoryLimit, TheBoundIsAPartOfItUnlessSet) {
  unsetenv("TESSERA_ARENA_BOUND_BYTES");
  EXPECT_EQ(default_arena_bound(3).value, memory_limit().value / 4 * 3 / 3);
  setenv("TESSERA_ARENA_BOUND_BYTES", "12345678", 1);
  EXPECT_EQ(default_arena_bound(3), Bytes{12345678});
  setenv("TESSERA_ARENA_BOUND_BYTES", "-1", 1);
  EXPECT_THROW(default_arena_bound(), ConfigError);
  setenv("TESSERA_ARENA_BOUND_BYTES", "4G", 1);
  EXPECT_THROW(default_arena_bound(), ConfigError);
  unsetenv("TESSERA_ARENA_BOUND_BYTES");
}

}  // namespace
}  // namespace tessera
