#include "cli/doctor_command.h"

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "cli/doctor_findings.h"
#include "cli/libtorch_probe.h"
#include "cli/machine_files.h"
#include "tests/support/test_folder.h"

namespace tessera::cli {
namespace {

using nlohmann::json;

/// A folder that looks like the root of another machine.
class Machine : public ::testing::Test {
 protected:
  void file(const std::string& path, const std::string& contents) {
    std::filesystem::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << contents;
  }

  const test::TestFolder folder_;
  const std::filesystem::path root_ = folder_.path();
};

json named(const json& findings, const std::string& name) {
  for (const auto& finding : findings)
    if (finding["name"] == name) return finding;
  ADD_FAILURE() << "no finding '" << name << "'";
  return {};
}

/// A machine on which everything is as it should be.
json healthy() {
  return json::parse(R"({
    "libtorch": {"built_with": "2.13.0", "loaded": "2.13.1+cpu", "cxx11_abi": true, "library": "/lib/libtorch_cpu.so", "cpu_kernels": "AVX2",
                 "threads": 2, "blas": "mkl", "devices": {}, "backends": {"gloo": true, "nccl": false, "mpi": false, "ucc": false}},
    "cpu": {"model": "Some CPU", "cores": 8, "features": ["avx2", "avx512_bf16"]},
    "memory": {"total_bytes": 17179869184, "available_bytes": 1610612736, "cgroup_limit_bytes": null, "cgroup_used_bytes": null,
               "cgroup_cores": null},
    "huge_pages": {"anonymous": "madvise", "shared": "advise", "reserved": {"size_bytes": 2097152, "total": 0, "free": 0}},
    "kernel": {"release": "6.1.0", "distribution": "Debian GNU/Linux 12", "io_uring_disabled": 0},
    "system_calls": {"memfd": null, "pidfd": null, "futex": null, "descriptor_passing": null, "io_uring": null},
    "dev_shm": {"size_bytes": 8589934592, "free_bytes": 8589934592, "writable": true},
    "limits": {"open_files": 4096, "locked_bytes": null, "address_space_bytes": null, "processes": null}})");
}

TEST_F(Machine, WithoutProcIsUnknownNotAnError) {
  EXPECT_EQ(read_cpu(root_), (json{{"model", nullptr}, {"cores", 0}, {"features", json::array()}}));
  EXPECT_TRUE(read_memory(root_)["cgroup_limit_bytes"].is_null());
  EXPECT_TRUE(read_huge_pages(root_)["shared"].is_null());
  EXPECT_TRUE(read_kernel(root_)["release"].is_null());
}

TEST_F(Machine, ProcessorOfX86) {
  file("proc/cpuinfo",
       "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx avx2 avx512_bf16\n\nprocessor\t: 1\nmodel name\t: AMD "
       "EPYC\n");
  EXPECT_EQ(read_cpu(root_), (json{{"model", "AMD EPYC"}, {"cores", 2}, {"features", {"avx2", "avx512_bf16"}}}));
}

TEST_F(Machine, ProcessorOfArm) {
  file("proc/cpuinfo", "processor\t: 0\nFeatures\t: fp asimd sve bf16\n");
  EXPECT_EQ(read_cpu(root_), (json{{"model", nullptr}, {"cores", 1}, {"features", {"asimd", "sve", "bf16"}}}));
}

TEST_F(Machine, TightestLimitOfCgroupsVersion2) {
  file("proc/meminfo", "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n");
  file("proc/self/cgroup", "0::/outer/inner\n");
  file("sys/fs/cgroup/outer/inner/memory.max", "max\n");
  file("sys/fs/cgroup/outer/memory.max", "1073741824\n");
  file("sys/fs/cgroup/outer/memory.current", "1048576\n");
  file("sys/fs/cgroup/outer/cpu.max", "150000 100000\n");
  file("sys/fs/cgroup/outer/inner/cpu.max", "max 100000\n");
  EXPECT_EQ(read_memory(root_), (json{{"total_bytes", int64_t{16} << 30},
                                      {"available_bytes", int64_t{8} << 30},
                                      {"cgroup_limit_bytes", 1 << 30},
                                      {"cgroup_used_bytes", 1 << 20},
                                      {"cgroup_cores", 1.5}}));
}

TEST_F(Machine, LimitsOfCgroupsVersion1) {
  file("proc/self/cgroup", "5:cpu,cpuacct:/box\n4:memory:/box\n0::/\n");
  file("sys/fs/cgroup/memory/box/memory.limit_in_bytes", "2147483648\n");
  file("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  file("sys/fs/cgroup/cpu/box/cpu.cfs_quota_us", "-1\n");
  file("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "200000\n");
  file("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  const json memory = read_memory(root_);
  EXPECT_EQ(memory["cgroup_limit_bytes"], int64_t{2} << 30);
  EXPECT_EQ(memory["cgroup_cores"], 2.0);
}

TEST_F(Machine, HugePagesAndSystem) {
  file("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
  file("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size advise [never] deny force\n");
  file("proc/meminfo", "HugePages_Total:       4\nHugePages_Free:        3\nHugepagesize:       2048 kB\n");
  file("etc/os-release", "NAME=\"Debian\"\nPRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\n");
  file("proc/sys/kernel/io_uring_disabled", "2\n");
  const json pages = read_huge_pages(root_), kernel = read_kernel(root_);
  EXPECT_EQ(pages["anonymous"], "madvise");
  EXPECT_EQ(pages["shared"], "never");
  EXPECT_EQ(pages["reserved"], (json{{"size_bytes", 2 << 20}, {"total", 4}, {"free", 3}}));
  EXPECT_EQ(kernel["distribution"], "Debian GNU/Linux 12 (bookworm)");
  EXPECT_EQ(kernel["io_uring_disabled"], 2);
}

TEST(Doctor, FindsNothingAgainstAHealthyMachine) {
  for (const auto& finding : judge(healthy())) EXPECT_EQ(finding["mark"], "ok") << finding;
  EXPECT_EQ(named(judge(healthy()), "memory")["text"], "16 GiB, 1.5 GiB available");
}

TEST(Doctor, SaysHowToMakeSharedPagesHuge) {
  json facts = healthy();
  facts["huge_pages"]["shared"] = "never";
  const json finding = named(judge(facts), "huge pages, shared");
  EXPECT_EQ(finding["mark"], "note");
  EXPECT_EQ(finding["needed_for"], "faster reads of other ranks' gradients");
  EXPECT_EQ(finding["advice"], "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled (as root)");
}

TEST(Doctor, KnowsWhatIsRequired) {
  for (const char* call : {"memfd", "pidfd", "futex"}) {
    json facts = healthy();
    facts["dev_shm"]["writable"] = false;  // which would do instead of memfds
    facts["system_calls"][call] = "Function not implemented";
    const json finding = named(judge(facts), call);
    EXPECT_EQ(finding["mark"], "missing");
    EXPECT_EQ(finding["required"], true);
  }
  json facts = healthy();
  facts["system_calls"]["memfd"] = "Operation not permitted";
  EXPECT_EQ(named(judge(facts), "memfd")["required"], false);
  facts["system_calls"]["io_uring"] = "Operation not permitted";
  facts["kernel"]["io_uring_disabled"] = 2;
  EXPECT_EQ(named(judge(facts), "io_uring")["required"], false);
  EXPECT_EQ(named(judge(facts), "io_uring")["advice"], "sysctl kernel.io_uring_disabled=0");
}

TEST(Doctor, RefusesAnotherLibtorchThanItsOwn) {
  json facts = healthy();
  facts["libtorch"]["loaded"] = "2.12.0";
  EXPECT_EQ(named(judge(facts), "libtorch")["required"], true);
  facts["libtorch"]["loaded"] = facts["libtorch"]["built_with"] = "2.9.1";
  EXPECT_EQ(named(judge(facts), "libtorch")["required"], true);
  facts["libtorch"]["loaded"] = facts["libtorch"]["built_with"] = "2.11.0";
  EXPECT_EQ(named(judge(facts), "libtorch")["mark"], "ok");
}

TEST(Doctor, NotesWhatCouldBeBetter) {
  json facts = healthy();
  facts["memory"]["cgroup_cores"] = 2.5;
  facts["memory"]["cgroup_limit_bytes"] = int64_t{4} << 30;
  facts["memory"]["cgroup_used_bytes"] = 1 << 20;
  facts["cpu"]["features"] = {"avx2"};
  facts["dev_shm"]["free_bytes"] = 64 << 20;
  facts["limits"]["open_files"] = 256;
  facts["libtorch"]["devices"] = {{"cuda", 2}};
  const json findings = judge(facts);
  for (const char* name : {"processor", "SIMD", "/dev/shm", "limits", "back-ends"})
    EXPECT_EQ(named(findings, name)["mark"], "note") << name;
  EXPECT_EQ(named(findings, "memory")["text"], "16 GiB, 1.5 GiB available; the cgroup allows 4 GiB, 1 MiB used");
  EXPECT_EQ(named(findings, "devices")["text"], "2 cuda");
  facts["dev_shm"] = nullptr;
  EXPECT_EQ(named(judge(facts), "/dev/shm")["mark"], "missing");
}

TEST(Doctor, ReadsLibtorchsConfiguration) {
  const std::string config = "  - Build settings: BLAS_INFO=mkl, TORCH_VERSION=2.13.0, USE_GLOO=ON, \n";
  EXPECT_EQ(config_value(config, "TORCH_VERSION"), "2.13.0");
  EXPECT_EQ(config_value(config, "BLAS_INFO"), "mkl");
  EXPECT_EQ(config_value(config, "VERSION"), "");
}

TEST(Doctor, ExaminesThisMachine) {
  const json examination = examine_machine();
  EXPECT_EQ(exit_status(examination), 0) << describe(examination);
  EXPECT_TRUE(examination["system_calls"]["memfd"].is_null());
  EXPECT_TRUE(examination["system_calls"]["descriptor_passing"].is_null());
  EXPECT_GE(examination["cpu"]["cores"], 1);
  EXPECT_GT(examination["memory"]["total_bytes"], 0);
  EXPECT_EQ(examination["libtorch"]["cxx11_abi"], true);
  EXPECT_NO_THROW(examination.dump());
}

TEST(Doctor, DescribesInAlignedLines) {
  json examination = healthy();
  examination["system_calls"]["pidfd"] = "Function not implemented";
  examination["findings"] = judge(examination);
  examination["ok"] = false;
  const std::string description = describe(examination);
  EXPECT_NE(description.find("ok       memfd                 works\n"), std::string::npos) << description;
  EXPECT_NE(description.find("missing  pidfd                 refused: Function not implemented\n"), std::string::npos)
      << description;
  EXPECT_NE(description.find("  pidfd                 required for noticing within a second that a rank died\n"),
            std::string::npos)
      << description;
  EXPECT_EQ(exit_status(examination), 1);
}

}  // namespace
}  // namespace tessera::cli
