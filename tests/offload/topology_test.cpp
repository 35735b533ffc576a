#include "offload/topology.h"

#include <cstdlib>
#include <sched.h>
#include <string>
#include <thread>

#include <gtest/gtest.h>

#include "tests/base/temporary_folder.h"

namespace terrace {
namespace {

/// hwloc describes another machine while this lives.
class OtherMachine {
 public:
  OtherMachine(const char* variable, const std::string& value) : variable_(variable) {
    ::setenv(variable, value.c_str(), 1);
  }
  ~OtherMachine() { ::unsetenv(variable_); }
  OtherMachine(const OtherMachine&) = delete;
  OtherMachine& operator=(const OtherMachine&) = delete;

 private:
  const char* variable_;
};

TEST(Topology, counts_packages_cores_threads_nodes_and_caches) {
  const OtherMachine machine("HWLOC_SYNTHETIC",
                             "package:2 [numanode(memory=64GiB)] l3:1(size=32MiB) l2:4(size=1MiB) core:1 pu:2");
  const Topology topology = read_topology();
  EXPECT_EQ(topology.packages, 2U);
  EXPECT_EQ(topology.cores, 8U);
  EXPECT_EQ(topology.threads, 16U);
  constexpr std::uint64_t gib = std::uint64_t{1} << 30;
  EXPECT_EQ(topology.numa_nodes, (std::vector<Topology::NumaNode>{{0, 64 * gib, 8}, {1, 64 * gib, 8}}));
  EXPECT_EQ(topology.caches, (std::vector<Topology::Cache>{{2, 1U << 20, 8}, {3, 32U << 20, 2}}));
  EXPECT_TRUE(topology.attached.empty());
}

/// Two nodes of one thread each; a GPU without a driver and a drive at the second, a network card at the first.
constexpr const char* kMachineWithDevices = R"(<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE topology SYSTEM "hwloc2.dtd">
<topology version="2.0">
 <object type="Machine" os_index="0" cpuset="0x3" complete_cpuset="0x3" allowed_cpuset="0x1" nodeset="0x3" complete_nodeset="0x3" allowed_nodeset="0x3" gp_index="1">
  <object type="Package" os_index="0" cpuset="0x1" complete_cpuset="0x1" nodeset="0x1" complete_nodeset="0x1" gp_index="2">
   <object type="NUMANode" os_index="0" cpuset="0x1" complete_cpuset="0x1" nodeset="0x1" complete_nodeset="0x1" gp_index="3" local_memory="1000"/>
   <object type="Core" os_index="0" cpuset="0x1" complete_cpuset="0x1" nodeset="0x1" complete_nodeset="0x1" gp_index="4">
    <object type="PU" os_index="0" cpuset="0x1" complete_cpuset="0x1" nodeset="0x1" complete_nodeset="0x1" gp_index="5"/>
   </object>
   <object type="Bridge" gp_index="6" bridge_type="0-1" depth="0" bridge_pci="0000:[00-00]">
    <object type="PCIDev" gp_index="7" pci_busid="0000:00:01.0" pci_type="0200 [1af4:1041] [1af4:1041] 01" pci_link_speed="0.0"/>
   </object>
  </object>
  <object type="Package" os_index="1" cpuset="0x2" complete_cpuset="0x2" nodeset="0x2" complete_nodeset="0x2" gp_index="12">
   <object type="NUMANode" os_index="1" cpuset="0x2" complete_cpuset="0x2" nodeset="0x2" complete_nodeset="0x2" gp_index="13" local_memory="2000"/>
   <object type="Core" os_index="1" cpuset="0x2" complete_cpuset="0x2" nodeset="0x2" complete_nodeset="0x2" gp_index="14">
    <object type="PU" os_index="1" cpuset="0x2" complete_cpuset="0x2" nodeset="0x2" complete_nodeset="0x2" gp_index="15"/>
   </object>
   <object type="Bridge" gp_index="16" bridge_type="0-1" depth="0" bridge_pci="0000:[80-81]">
    <object type="PCIDev" gp_index="17" pci_busid="0000:81:00.0" pci_type="0302 [10de:2335] [10de:0001] a1" pci_link_speed="0.0">
     <info name="PCIDevice" value="GH100 [H200 SXM 141GB]"/>
    </object>
    <object type="PCIDev" gp_index="18" pci_busid="0000:82:00.0" pci_type="0108 [144d:a80a] [144d:a801] 00" pci_link_speed="0.0">
     <object type="OSDev" gp_index="19" name="nvme0n1" osdev_type="0">
      <info name="Model" value="FastDrive 9000"/>
     </object>
    </object>
   </object>
  </object>
 </object>
</topology>
)";

TEST(Topology, lists_gpus_and_drives_with_the_node_that_they_are_attached_to) {
  const TemporaryFolder folder;
  const OtherMachine machine("HWLOC_XMLFILE", folder.write("machine.xml", kMachineWithDevices).string());
  const Topology topology = read_topology();
  using Attached = Topology::Attached;
  EXPECT_EQ(topology.attached,
            (std::vector<Attached>{{Attached::Kind::gpu, "0000:81:00.0", "GH100 [H200 SXM 141GB]", 1},
                                   {Attached::Kind::drive, "nvme0n1", "FastDrive 9000", 1}}));
  EXPECT_EQ(topology.threads, 2U);
  EXPECT_EQ(topology.usable_threads, 1U) << "one of them is not allowed";
}

TEST(Topology, tells_little_and_does_not_throw_where_the_machine_cannot_be_seen) {
  const TemporaryFolder folder;
  const OtherMachine machine("HWLOC_XMLFILE", folder.write("machine.xml", "nonsense").string());
  EXPECT_NO_THROW(read_topology());
}

TEST(Topology, of_this_machine_counts_what_the_process_may_run_on) {
  const Topology topology = read_topology();
  EXPECT_EQ(topology.library.rfind("hwloc ", 0), 0U);
  EXPECT_GE(topology.threads, topology.usable_threads);
  EXPECT_GE(topology.threads, topology.cores);
  EXPECT_GE(topology.packages, 1U);
  cpu_set_t set;
  ASSERT_EQ(::sched_getaffinity(0, sizeof set, &set), 0);
  EXPECT_EQ(topology.usable_threads, static_cast<std::size_t>(CPU_COUNT(&set)));
}

}  // namespace
}  // namespace terrace
