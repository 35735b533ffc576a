#include "tools/account.h"

#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace terrace {
namespace {

constexpr std::uint64_t MiB = 1 << 20;

/// 100 seconds on a machine with room to spare. Every tier is full, and tensors take half of the device.
RunFacts full_tiers() {
  RunFacts facts;
  facts.seconds = 100;
  facts.cores = 8;
  facts.threads = 4;
  const auto fill = [&](Tier tier, std::uint64_t bytes) {
    facts.usage.tiers[index_of(tier)].capacity = bytes;
    facts.usage.tiers[index_of(tier)].peak = bytes;
    facts.spare_bytes[index_of(tier)] = 1000 * MiB;
  };
  fill(Tier::device, 48 * MiB);
  fill(Tier::host, 180 * MiB);
  fill(Tier::nvme, 400 * MiB);
  facts.usage.tiers[index_of(Tier::device)].peak_by_kind[index_of(Kind::other)] = 24 * MiB;
  return facts;
}

void half_full(RunFacts& facts, Tier tier) { facts.usage.tiers[index_of(tier)].peak /= 2; }
void no_room(RunFacts& facts, Tier tier) { facts.spare_bytes[index_of(tier)] = MiB; }

struct Case {
  const char* name;
  StallCause cause;
  std::function<void(RunFacts&)> change;
  std::string suggestion;
};

const std::vector<Case>& cases() {
  static const std::string drive = "use a faster drive, or several: nvme.paths stripes over its folders";
  static const std::vector<Case> all{
      {"nothing comes ahead", StallCause::nvme_to_host, [](RunFacts& facts) { facts.config.io.prefetch = 0; },
       "raise io.prefetch (now 0) so that bytes come ahead of need"},
      {"the host is full", StallCause::nvme_to_host, [](RunFacts&) {},
       "raise host.memory (now 180MiB) so that less rests on NVMe, or use a faster drive"},
      {"the machine has no more", StallCause::nvme_to_host, [](RunFacts& facts) { no_room(facts, Tier::host); }, drive},
      {"the host has room and may not use it", StallCause::nvme_to_host,
       [](RunFacts& facts) {
         half_full(facts, Tier::host);
         facts.config.placement.optimizer = Config::Shares{.nvme = 1};
       },
       "lower the shares of nvme in [placement]: the host has room"},
      {"the host has room", StallCause::nvme_to_host, [](RunFacts& facts) { half_full(facts, Tier::host); }, drive},

      {"nothing comes ahead to the device", StallCause::host_to_device,
       [](RunFacts& facts) { facts.config.io.prefetch = 0; },
       "raise io.prefetch (now 0) so that bytes come ahead of need"},
      {"the device is full", StallCause::host_to_device, [](RunFacts&) {},
       "raise device.memory (now 48MiB) so that more stays there"},
      {"chunks are capped", StallCause::host_to_device,
       [](RunFacts& facts) {
         half_full(facts, Tier::device);
         facts.config.device.chunks = 10 * MiB;
         facts.usage.tiers[index_of(Tier::device)].chunk_peak = 10 * MiB;
       },
       "raise device.chunks (now 10MiB): device.memory has room"},
      {"chunks are capped and the device is full", StallCause::host_to_device,
       [](RunFacts& facts) {
         facts.config.device.chunks = 10 * MiB;
         facts.usage.tiers[index_of(Tier::device)].chunk_peak = 10 * MiB;
       },
       "raise device.memory (now 48MiB) so that more stays there"},
      {"the link is emulated", StallCause::host_to_device,
       [](RunFacts& facts) {
         no_room(facts, Tier::device);
         facts.config.device.link = 512 * MiB;
       },
       "raise device.link (now 512MiB/s), which emulates a link of that rate"},
      {"nothing helps the link", StallCause::host_to_device, [](RunFacts& facts) { no_room(facts, Tier::device); }, ""},

      {"the device is full of what has to leave", StallCause::device_to_host, [](RunFacts&) {},
       "raise device.memory (now 48MiB) so that less has to leave it"},
      {"nothing helps the link back", StallCause::device_to_host,
       [](RunFacts& facts) { half_full(facts, Tier::device); }, ""},

      {"activations could go", StallCause::device_room,
       [](RunFacts& facts) { facts.config.placement.activations = "keep"; },
       "raise device.memory (now 48MiB), or set placement.activations = \"recompute\""},
      {"activations go as they must", StallCause::device_room, [](RunFacts&) {}, "raise device.memory (now 48MiB)"},
      {"activations are recomputed", StallCause::device_room,
       [](RunFacts& facts) { facts.config.placement.activations = "recompute"; }, "raise device.memory (now 48MiB)"},
      {"only activations could go", StallCause::device_room,
       [](RunFacts& facts) {
         no_room(facts, Tier::device);
         facts.config.placement.activations = "keep";
       },
       "set placement.activations = \"recompute\""},
      {"only the batch could be smaller", StallCause::device_room,
       [](RunFacts& facts) {
         no_room(facts, Tier::device);
         facts.config.placement.activations = "recompute";
       },
       "lower train.micro_batch (now 4) and raise train.accumulate as much"},
      {"nothing makes room", StallCause::device_room,
       [](RunFacts& facts) {
         no_room(facts, Tier::device);
         facts.config.placement.activations = "recompute";
         facts.config.train.micro_batch = 1;
       },
       ""},
      {"tensors are small", StallCause::device_room,
       [](RunFacts& facts) {
         no_room(facts, Tier::device);
         facts.usage.tiers[index_of(Tier::device)].peak_by_kind = {};
       },
       ""},

      {"the host may be larger", StallCause::host_room, [](RunFacts&) {}, "raise host.memory (now 180MiB)"},
      {"the host may not", StallCause::host_room, [](RunFacts& facts) { no_room(facts, Tier::host); },
       "use a faster drive: what leaves the host is written to it"},
      {"there is nothing below the host", StallCause::host_room,
       [](RunFacts& facts) {
         no_room(facts, Tier::host);
         facts.usage.tiers[index_of(Tier::nvme)] = {};
       },
       ""},

      {"the drive has room", StallCause::nvme_room, [](RunFacts&) {}, "raise nvme.memory (now 400MiB)"},
      {"the drive has none", StallCause::nvme_room, [](RunFacts& facts) { no_room(facts, Tier::nvme); }, ""},

      {"updates take more than a core", StallCause::update,
       [](RunFacts& facts) {
         facts.threads = 8;
         facts.update_seconds = 20;
       },
       "leave the update a core: OMP_NUM_THREADS=7 (now 8 threads on 8 cores)"},
      {"updates take less than the core they would get", StallCause::update,
       [](RunFacts& facts) {
         facts.threads = 8;
         facts.update_seconds = 10;
       },
       ""},
      {"there is one core", StallCause::update,
       [](RunFacts& facts) {
         facts.threads = facts.cores = 1;
         facts.update_seconds = 60;
       },
       ""},
      {"updates have a core and wait for NVMe", StallCause::update,
       [](RunFacts& facts) { facts.usage.tiers[index_of(Tier::nvme)].peak_by_kind[index_of(Kind::momentum)] = MiB; },
       "raise host.memory (now 180MiB) so that less of the optimizer's state rests on NVMe"},
      {"updates have a core", StallCause::update, [](RunFacts&) {}, ""},
  };
  return all;
}

TEST(Account, suggests_what_can_help_against_each_cause) {
  for (const Case& row : cases()) {
    RunFacts facts = full_tiers();
    facts.stall_seconds_by_cause[index_of(row.cause)] = 34;
    row.change(facts);
    const Account account = account_of(facts);
    EXPECT_EQ(account.bound, name_of(row.cause)) << row.name;
    EXPECT_EQ(account.suggestion, row.suggestion) << row.name;
  }
}

TEST(Account, says_what_the_time_was_spent_on) {
  RunFacts facts = full_tiers();
  facts.stall_seconds_by_cause[index_of(StallCause::nvme_to_host)] = 34;
  facts.stall_seconds_by_cause[index_of(StallCause::device_room)] = 6;
  facts.update_seconds = 10;
  const Account account = account_of(facts);
  EXPECT_EQ(account.computation_seconds, 50);
  EXPECT_EQ(account.update_seconds, 10);
  EXPECT_EQ(account.stall_seconds_by_cause, facts.stall_seconds_by_cause);
  EXPECT_EQ(account.reason, "34% of the time was spent waiting for bytes from NVMe");
}

TEST(Account, names_every_cause_in_the_reason) {
  std::vector<std::string> reasons;
  for (const StallCause cause : all_stall_causes) {
    RunFacts facts = full_tiers();
    facts.stall_seconds_by_cause[index_of(cause)] = 34;
    const std::string reason = account_of(facts).reason;
    EXPECT_TRUE(reason.starts_with("34% of the time was spent ")) << reason;
    EXPECT_EQ(std::count(reasons.begin(), reasons.end(), reason), 0) << reason;
    reasons.push_back(reason);
  }
}

TEST(Account, has_computation_as_the_bound_while_the_rest_is_little) {
  RunFacts facts = full_tiers();
  facts.stall_seconds_by_cause[index_of(StallCause::nvme_to_host)] = 2;
  facts.stall_seconds_by_cause[index_of(StallCause::update)] = 1;
  facts.update_seconds = 1.5;
  const Account account = account_of(facts);
  EXPECT_EQ(account.bound, "computation");
  EXPECT_EQ(account.reason, "96% of the time was spent on it");
  EXPECT_EQ(account.suggestion, "");
}

TEST(Account, counts_updates_and_waits_for_them_as_one) {
  RunFacts facts = full_tiers();
  facts.stall_seconds_by_cause[index_of(StallCause::nvme_to_host)] = 10;
  facts.stall_seconds_by_cause[index_of(StallCause::update)] = 6;
  facts.update_seconds = 6;
  EXPECT_EQ(account_of(facts).bound, "update");
  EXPECT_EQ(account_of(facts).reason, "12% of the time was spent on updates, or waiting for them");
}

TEST(Account, of_no_time_is_bound_by_nothing_else_than_computation) { EXPECT_EQ(account_of({}).bound, "computation"); }

}  // namespace
}  // namespace terrace
