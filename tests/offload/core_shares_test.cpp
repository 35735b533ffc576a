// Who owns which hardware threads, on machines of many kinds.

#include "offload/core_shares.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "offload/hwloc_handle.h"

namespace terrace {
namespace {

HwlocTopology machine(const std::string& description) {
  hwloc_topology_t topology = nullptr;
  if (hwloc_topology_init(&topology) != 0) throw std::runtime_error("hwloc_topology_init");
  HwlocTopology owner(topology, &hwloc_topology_destroy);
  if (hwloc_topology_set_synthetic(topology, description.c_str()) != 0 || hwloc_topology_load(topology) != 0) {
    throw std::runtime_error("hwloc does not understand " + description);
  }
  return owner;
}

struct Question {
  std::string machine;
  int compute_threads = 1;
  std::optional<unsigned> near_to{};
  std::string usable = "0-1023";  ///< ranges
};

CoreShares shares(const Question& question) {
  const HwlocTopology topology = machine(question.machine);
  const HwlocBitmap usable(hwloc_bitmap_alloc(), &hwloc_bitmap_free);
  hwloc_bitmap_list_sscanf(usable.get(), question.usable.c_str());
  return share_cores(topology.get(), usable.get(), question.compute_threads, question.near_to);
}

struct Owners {
  std::string compute, update, transfers;  ///< ranges; "": any
  bool operator==(const Owners&) const = default;
};

void PrintTo(const Owners& owners, std::ostream* out) {
  *out << owners.compute << " | " << owners.update << " | " << owners.transfers;
}

Owners owners(const Question& question) {
  const CoreShares found = shares(question);
  return {ranges_of(found.compute.processors), ranges_of(found.update.processors),
          ranges_of(found.transfers.processors)};
}

constexpr const char* kEightCores = "pack:1 core:8 pu:1";
constexpr const char* kEightCoresOfTwo = "pack:1 core:8 pu:2";
/// 0-15 at node 0, 16-31 at node 1; the two of a core are neighbours.
constexpr const char* kTwoSockets = "pack:2 [numa] core:8 pu:2";
/// The same as servers number it: 0-7 and 8-15 are first on their cores at node 0 and 1, 16-31 second.
constexpr const char* kTwoSocketsAsServers = "pack:2 [numa] core:8 pu:2(indexes=2*16:1*2)";

TEST(CoreShares, compute_gets_as_many_as_it_has_threads_and_the_others_the_rest) {
  EXPECT_EQ(owners({.machine = kEightCores, .compute_threads = 3}), (Owners{"0-2", "3-7", "3-7"}));
  EXPECT_EQ(owners({.machine = kEightCores, .compute_threads = 1}), (Owners{"0", "1-7", "1-7"}));
}

TEST(CoreShares, threads_of_compute_have_cores_before_any_two_share_one) {
  EXPECT_EQ(owners({.machine = kEightCoresOfTwo, .compute_threads = 8}),
            (Owners{"0,2,4,6,8,10,12,14", "1,3,5,7,9,11,13,15", "1,3,5,7,9,11,13,15"}));
  EXPECT_EQ(owners({.machine = kEightCoresOfTwo, .compute_threads = 10}),
            (Owners{"0-4,6,8,10,12,14", "5,7,9,11,13,15", "5,7,9,11,13,15"}));
  EXPECT_EQ(owners({.machine = kEightCoresOfTwo, .compute_threads = 2}), (Owners{"0,2", "1,3-15", "1,3-15"}));
}

TEST(CoreShares, update_and_transfers_are_near_to_the_device) {
  EXPECT_EQ(owners({.machine = kTwoSockets, .compute_threads = 8, .near_to = 0}),
            (Owners{"16,18,20,22,24,26,28,30", "0-15,17,19,21,23,25,27,29,31", "0-15"}));
  EXPECT_EQ(owners({.machine = kTwoSockets, .compute_threads = 8, .near_to = 1}),
            (Owners{"0,2,4,6,8,10,12,14", "1,3,5,7,9,11,13,15-31", "16-31"}));
  EXPECT_EQ(owners({.machine = kTwoSockets, .compute_threads = 16, .near_to = 1}),
            (Owners{"0,2,4,6,8,10,12,14,16,18,20,22,24,26,28,30", "1,3,5,7,9,11,13,15,17,19,21,23,25,27,29,31",
                    "17,19,21,23,25,27,29,31"}));
}

TEST(CoreShares, hardware_threads_go_by_their_core_however_the_system_numbers_them) {
  EXPECT_EQ(owners({.machine = kTwoSocketsAsServers, .compute_threads = 16, .near_to = 1}),
            (Owners{"0-15", "16-31", "24-31"}));
}

TEST(CoreShares, where_too_few_are_near_transfers_share_all_of_the_update) {
  EXPECT_EQ(owners({.machine = kTwoSockets, .compute_threads = 4, .near_to = 1, .usable = "0-15,16,18"}),
            (Owners{"0,2,4,6", "1,3,5,7-16,18", "1,3,5,7-16,18"}));
  EXPECT_EQ(owners({.machine = kEightCores, .compute_threads = 2, .near_to = 7}), (Owners{"0-1", "2-7", "2-7"}))
      << "there is no such node";
}

TEST(CoreShares, transfers_run_on_any_where_the_update_has_less_than_one_for_each_link) {
  EXPECT_EQ(owners({.machine = kEightCores, .compute_threads = 4}), (Owners{"0-3", "4-7", "4-7"}));
  EXPECT_EQ(owners({.machine = kEightCores, .compute_threads = 5}), (Owners{"0-4", "5-7", ""}));
  EXPECT_EQ(owners({.machine = "pack:1 core:2 pu:1", .compute_threads = 1}), (Owners{"0", "1", ""}));
}

TEST(CoreShares, nobody_is_bound_where_compute_leaves_nothing) {
  const std::string one_core = "pack:1 core:1 pu:1";
  for (const auto& [machine, threads] :
       {std::pair{kEightCores, 8}, {kEightCores, 100}, {kTwoSockets, 32}, {one_core.c_str(), 1}}) {
    const CoreShares found = shares({.machine = machine, .compute_threads = threads, .near_to = 0});
    EXPECT_FALSE(found.update_in_background);
    EXPECT_EQ(found.update_threads, threads) << "the update has all of them while the program waits";
    for (const CoreShares::Share& share : {found.compute, found.update, found.transfers}) {
      EXPECT_EQ(share, CoreShares::Share{});
    }
  }
}

TEST(CoreShares, the_update_has_a_thread_for_each_that_it_owns) {
  for (int compute = 1; compute < 32; ++compute) {
    for (const std::optional<unsigned> near_to : {std::optional<unsigned>{}, {0}, {1}}) {
      const CoreShares found = shares({.machine = kTwoSockets, .compute_threads = compute, .near_to = near_to});
      EXPECT_TRUE(found.update_in_background);
      EXPECT_EQ(found.update_threads, 32 - compute);
      EXPECT_EQ(found.update.processors.size(), static_cast<std::size_t>(32 - compute));
      EXPECT_EQ(found.compute.processors.size(), static_cast<std::size_t>(compute));
      Processors all = found.compute.processors;
      all.insert(all.end(), found.update.processors.begin(), found.update.processors.end());
      std::sort(all.begin(), all.end());
      EXPECT_EQ(ranges_of(all), "0-31") << "each has one owner";
    }
  }
}

TEST(CoreShares, only_what_the_process_may_run_on_is_shared_out) {
  EXPECT_EQ(owners({.machine = kTwoSockets, .compute_threads = 2, .near_to = 1, .usable = "4-7,20-23"}),
            (Owners{"4,6", "5,7,20-23", "20-23"}));
  EXPECT_EQ(owners({.machine = kEightCoresOfTwo, .compute_threads = 2, .usable = "1,3-5"}), (Owners{"1,3", "4-5", ""}))
      << "the second of a core is its first where the first may not be used";
  EXPECT_EQ(shares({.machine = kEightCores, .compute_threads = 8, .usable = "3"}).update_in_background, false);
}

TEST(CoreShares, tell_their_numa_nodes_where_there_are_several) {
  const CoreShares two = shares({.machine = kTwoSockets, .compute_threads = 8, .near_to = 0});
  EXPECT_EQ(two.compute.numa_nodes, std::vector<unsigned>{1});
  EXPECT_EQ(two.update.numa_nodes, (std::vector<unsigned>{0, 1}));
  EXPECT_EQ(two.transfers.numa_nodes, std::vector<unsigned>{0});
  const CoreShares one = shares({.machine = kEightCores, .compute_threads = 2});
  EXPECT_TRUE(one.compute.numa_nodes.empty() && one.update.numa_nodes.empty());
}

TEST(CoreShares, a_program_without_threads_is_one_thread) {
  EXPECT_EQ(owners({.machine = kEightCores, .compute_threads = 0}), (Owners{"0", "1-7", "1-7"}));
}

TEST(CoreShares, of_this_machine_are_of_what_this_process_may_run_on) {
  const Processors usable = processors_of_this_thread();
  ASSERT_FALSE(usable.empty());
  const CoreShares found = share_cores(1, std::nullopt);
  Processors all = found.compute.processors;
  all.insert(all.end(), found.update.processors.begin(), found.update.processors.end());
  std::sort(all.begin(), all.end());
  EXPECT_EQ(all, usable.size() > 1 ? usable : Processors{});
  EXPECT_EQ(share_cores(static_cast<int>(usable.size()), std::nullopt).update_in_background, false);
}

}  // namespace
}  // namespace terrace
