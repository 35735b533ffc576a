#include "tools/report.h"

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/units.h"
#include "offload/host_arena.h"
#include "tools/formatted.h"
#include "tools/machine.h"
#include "tools/text_table.h"

namespace terrace {
namespace {

using Json = nlohmann::ordered_json;
using Rows = std::vector<std::vector<std::string>>;

constexpr double kShownShare = 0.005;  // less reads 0%

std::string bytes_or_dash(std::uint64_t bytes) { return bytes == 0 ? "-" : format_bytes(bytes); }

/// What a terminal can show whatever the bytes are.
std::string printable(std::string_view text) {
  std::string shown;
  for (const char byte : text) {
    const auto code = static_cast<unsigned char>(byte);
    const bool plain = byte == '\n' || byte == '\t' || (code >= 0x20 && code < 0x7f);
    shown += plain ? std::string(1, byte) : formatted("\\x%02x", static_cast<unsigned>(code));
  }
  return shown;
}

/// A table whose first line is a heading.
std::string headed(const Rows& rows, Looks looks) {
  const std::string table = format_table(rows);
  const std::size_t end = table.find('\n');
  return styled(table.substr(0, end), Style::heading, looks) + table.substr(end);
}

std::string memory_table(const MemoryUsage& usage, Looks looks) {
  std::vector<Tier> tiers;
  for (const Tier tier : all_tiers) {
    if (usage.capacity(tier) > 0) tiers.push_back(tier);
  }
  Rows rows;
  const auto add = [&](std::string name, auto bytes_of) {
    rows.push_back({std::move(name)});
    for (const Tier tier : tiers) rows.back().push_back(bytes_of(tier));
  };
  add("peak bytes", [](Tier tier) { return std::string(name_of(tier)); });
  for (const Kind kind : all_kinds) {
    add("  " + std::string(name_of(kind)), [&](Tier tier) { return bytes_or_dash(usage.peak(tier, kind)); });
  }
  add("  of these, in chunks", [&](Tier tier) { return bytes_or_dash(usage.chunk_peak(tier)); });
  add("all at one time", [&](Tier tier) { return format_bytes(usage.peak(tier)); });
  add("budget", [&](Tier tier) { return format_bytes(usage.capacity(tier)); });
  add("used", [&](Tier tier) {
    return formatted("%.0f%%", 100 * static_cast<double>(usage.peak(tier)) / static_cast<double>(usage.capacity(tier)));
  });
  return headed(rows, looks);
}

/// What a step has told of the budgets that it takes; empty where there was none.
std::string needed_text(const Report& report) {
  if (report.tokens == 0) return "";
  const MemoryUsage& usage = report.usage;
  const auto setting = [&](Tier tier) {
    const std::string exactly = format_bytes_exactly(usage.needed(tier));
    const std::string roughly = format_bytes(usage.needed(tier));
    return std::string(name_of(tier)) + ".memory = \"" + exactly + "\"" +
           (roughly == exactly ? "" : " (" + roughly + ")");
  };
  // A chunk of that size, where it is given, may have blocks of another by default.
  const bool names_block = usage.block_bytes != 0 && HostArena::choose_granule(usage.chunk_bytes) != usage.block_bytes;
  const std::string block = names_block ? " and io.block = \"" + format_bytes_exactly(usage.block_bytes) + "\"" : "";
  const std::string order = usage.laid_out_by_use ? " and placement.order = \"use\"" : "";
  return "this run needs " + setting(Tier::device) +
         (report.device_is_emulated ? ", not a byte less, with placement.chunk = \""
                                    : " or less, with placement.chunk = \"") +
         format_bytes_exactly(usage.chunk_bytes) + "\"" + block + order + "; " + setting(Tier::host) + " is enough\n";
}

std::string waste_text(const MemoryUsage& usage) {
  if (usage.chunk_room_bytes == 0) return "";
  const double share = static_cast<double>(usage.chunk_wasted_bytes) / static_cast<double>(usage.chunk_room_bytes);
  return "chunks take " + format_bytes(usage.chunk_room_bytes) + " where they rest; " +
         format_bytes(usage.chunk_wasted_bytes) + formatted(" of it (%.1f%%) holds nothing\n", 100 * share);
}

std::string moved_table(const Report& report, Looks looks) {
  Rows rows{{"moved", "in all", "a step"}};
  const auto steps = static_cast<std::uint64_t>(std::max<std::int64_t>(report.steps - report.resumed_after, 1));
  for (const Link link : all_links) {
    rows.push_back({"  " + std::string(name_of(link)), bytes_or_dash(report.usage.moved(link)),
                    bytes_or_dash(report.moved_in_steps[index_of(link)] / steps)});
  }
  return headed(rows, looks);
}

std::string account_text(const Account& account, Looks looks) {
  Rows rows{{"the steps' time", "share", ""}};
  const auto add = [&](std::string name, double seconds) {
    const double share = account.share_of(seconds);
    if (share >= kShownShare)
      rows.push_back({"  " + std::move(name), formatted("%.0f%%", 100 * share), format_duration(seconds)});
  };
  add("computation", account.computation_seconds);
  add("updates", account.update_seconds);
  for (const StallCause cause : all_stall_causes) {
    add("waiting: " + std::string(name_of(cause)), account.stall_seconds_by_cause[index_of(cause)]);
  }
  std::string text = headed(rows, looks) + "bound by " + account.bound + ": " + account.reason + "\n";
  if (!account.suggestion.empty()) text += "to go faster, " + account.suggestion + "\n";
  return text;
}

/// What a run was, or that there was none.
std::string summary(const Report& report) {
  const auto done = static_cast<long long>(report.steps);
  const auto planned = static_cast<long long>(report.planned_steps);
  const auto before = static_cast<long long>(report.resumed_after);
  if (report.resumed_after >= report.planned_steps) {
    return formatted(
        "nothing was left to do: resumed after step %lld, and the run ends after step %lld; last loss %.4f\n", before,
        planned, report.loss);
  }
  if (report.tokens == 0) return formatted("interrupted before the first of %lld steps\n", planned - before);
  return formatted("%s %lld of %lld steps%s: %lld tokens in %s, %.0f tokens/s, stalled %.0f%%, last loss %.4f\n",
                   report.interrupted ? "interrupted after" : "trained", done, planned,
                   before == 0 ? "" : formatted(", resumed after step %lld", before).c_str(),
                   static_cast<long long>(report.tokens), format_duration(report.seconds).c_str(),
                   report.tokens_per_second(), report.seconds > 0 ? 100 * report.stall_seconds / report.seconds : 0.0,
                   report.loss);
}

Json tier_json(const MemoryUsage& usage, Tier tier) {
  Json json;
  json["budget_bytes"] = usage.capacity(tier);
  json["peak_bytes"] = usage.peak(tier);
  if (tier != Tier::nvme) json["needed_bytes"] = usage.needed(tier);
  json["chunk_peak_bytes"] = usage.chunk_peak(tier);
  for (const Kind kind : all_kinds) json["peak_bytes_by_kind"][name_of(kind)] = usage.peak(tier, kind);
  return json;
}

Json account_json(const Account& account) {
  Json json;
  json["computation_seconds"] = account.computation_seconds;
  json["update_seconds"] = account.update_seconds;
  json["bound"] = account.bound;
  json["reason"] = account.reason;
  json["suggestion"] = account.suggestion;
  return json;
}

}  // namespace

std::string to_text(const Report& report, Looks looks) {
  std::string text = summary(report);
  text += formatted("%lld parameters, training state %s%s, built in %s\n", static_cast<long long>(report.parameters),
                    format_bytes(report.state_bytes).c_str(), report.managed ? "" : ", unmanaged",
                    format_duration(report.build_seconds).c_str());
  if (report.peak_resident_bytes) {
    text += "the process held at most " + format_bytes(*report.peak_resident_bytes) + " of memory\n";
  }
  if (report.skipped_steps > 0) {
    text += formatted("skipped %lld of the steps, whose gradients were not finite\n",
                      static_cast<long long>(report.skipped_steps));
  }
  if (report.held_out) {
    text += formatted("held-out loss %.4f nats; unigram entropy of the same %lld bytes %.4f nats; ratio %.3f\n",
                      report.held_out->loss, static_cast<long long>(report.held_out->bytes),
                      report.held_out->byte_entropy, report.held_out->loss / report.held_out->byte_entropy);
  }
  if (report.checkpoint) {
    text.append("saved to ").append(report.checkpoint->folder);
    text += formatted(" after step %lld, in %.2fs\n", static_cast<long long>(report.checkpoint->step),
                      report.checkpoint->seconds);
  }
  if (report.sample) text.append("\n--- sample ---\n").append(printable(*report.sample)).append("\n--------------\n");
  if (report.managed) {
    text.append("\n")
        .append(memory_table(report.usage, looks))
        .append(needed_text(report))
        .append(waste_text(report.usage));
    text.append("\n").append(moved_table(report, looks));
  }
  if (report.account) text.append("\n").append(account_text(*report.account, looks));
  return text;
}

std::string to_json(const Report& report) {
  Json run;
  run["name"] = "train";
  run["managed"] = report.managed;
  run["interrupted"] = report.interrupted;
  run["parameters"] = report.parameters;
  run["state_bytes"] = report.state_bytes;
  run["steps"] = report.steps;
  run["resumed_after"] = report.resumed_after;
  run["planned_steps"] = report.planned_steps;
  run["skipped_steps"] = report.skipped_steps;
  run["tokens"] = report.tokens;
  run["build_seconds"] = report.build_seconds;
  run["seconds"] = report.seconds;
  run["tokens_per_second"] = report.tokens_per_second();
  run["stall_seconds"] = report.stall_seconds;
  for (const StallCause cause : all_stall_causes) {
    run["stall_seconds_by_cause"][name_of(cause)] = report.stall_seconds_by_cause[index_of(cause)];
  }
  run["loss"] = report.loss;
  run["laid_out_by_use"] = report.usage.laid_out_by_use;
  run["chunk_bytes"] = report.usage.chunk_bytes;
  run["chunk_room_bytes"] = report.usage.chunk_room_bytes;
  run["chunk_wasted_bytes"] = report.usage.chunk_wasted_bytes;
  if (report.held_out) {
    run["held_out"] = {{"loss", report.held_out->loss},
                       {"byte_entropy", report.held_out->byte_entropy},
                       {"bytes", report.held_out->bytes}};
  }
  if (report.sample) run["sample"] = *report.sample;
  if (report.checkpoint) {
    run["checkpoint"] = {{"folder", report.checkpoint->folder},
                         {"step", report.checkpoint->step},
                         {"seconds", report.checkpoint->seconds}};
  }
  if (report.peak_resident_bytes) run["peak_resident_bytes"] = *report.peak_resident_bytes;
  for (const Tier tier : all_tiers) run["tiers"][name_of(tier)] = tier_json(report.usage, tier);
  for (const Link link : all_links) {
    run["bytes_moved"][name_of(link)] = report.usage.moved(link);
    for (const Kind kind : all_kinds) {
      run["bytes_moved_by_kind"][name_of(link)][name_of(kind)] = report.usage.moved(link, kind);
    }
  }
  if (report.account) run["account"] = account_json(*report.account);
  Json json;
  json["version"] = report_version;
  json["machine"] = machine_json(report.threads);
  json["cases"] = Json::array({std::move(run)});
  return json.dump(2, ' ', false, Json::error_handler_t::replace);  // a sample need not be UTF-8
}

}  // namespace terrace
