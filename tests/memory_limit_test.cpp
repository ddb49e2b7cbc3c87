#include "tessera/storage/memory_limit.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "tessera/base/types.h"
#include "tests/support/test_folder.h"

namespace tessera {
namespace {

class MemoryLimit : public testing::Test {
 protected:
  void write(const std::string& file, const std::string& contents) const {
    const std::filesystem::path path = root + file;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << contents;
  }
  const test::TestFolder folder;
  const std::string root = folder.path().string();
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

TEST_F(MemoryLimit, WhatIsLeftIsTheLeastOfTheGroupsAbove) {
  write("/proc/self/cgroup", "0::/a/b\n");
  write("/sys/fs/cgroup/a/b/memory.max", "1000000\n");
  write("/sys/fs/cgroup/a/b/memory.current", "100000\n");
  write("/sys/fs/cgroup/a/memory.max", "2000000\n");
  write("/sys/fs/cgroup/a/memory.current", "1800000\n");
  EXPECT_EQ(memory_left(root), Bytes{200000});
  write("/sys/fs/cgroup/a/memory.stat", "anon 700000\ninactive_file 500000\nactive_file 600000\n");
  EXPECT_EQ(memory_left(root), Bytes{700000});
  write("/sys/fs/cgroup/a/b/memory.current", "1000001\n");
  EXPECT_EQ(memory_left(root), Bytes{0});
}

TEST_F(MemoryLimit, WhatIsLeftInVersionOne) {
  write("/proc/self/cgroup", "4:memory:/docker/0123\n");
  write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "3000000\n");
  write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "2000000\n");
  write("/sys/fs/cgroup/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 1500000\n");
  EXPECT_EQ(memory_left(root), Bytes{2500000});
}

}  // namespace
}  // namespace tessera
