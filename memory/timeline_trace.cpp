#include "memory/timeline_trace.h"

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "memory/trace_json.h"

namespace terrace {
namespace {

constexpr int format_version = 1;

std::string name_of(const ChunkName& chunk) {
  return std::string(name_of(chunk.kind)) + " " + std::to_string(chunk.index);
}

std::string_view name_of(TransferPriority priority) {
  constexpr std::array<std::string_view, transfer_priority_count> names{"demand", "prefetch", "write back", "early"};
  return names[static_cast<std::size_t>(priority)];
}

/// The groups in which tracks are shown: Chrome's format calls them processes.
constexpr int program_group = 1;
constexpr int links_group = 2;
constexpr int group_of(Tier tier) noexcept { return 3 + static_cast<int>(tier); }

/// One bar of a track.
struct Slice {
  std::int64_t begin_ns;
  std::int64_t end_ns;
  const TimelineEvent* event;
};

class TraceWriter {
 public:
  TraceWriter(const TimelineSnapshot& timeline, std::ostream& out)
      : timeline_(timeline), out_(out), ever_used_(timeline.usage) {
    std::uint64_t step = 0;
    for (const TimelineEvent& event : timeline.events) {
      if (const auto* const usage = std::get_if<UsageEvent>(&event)) {
        ever_used_[index_of(usage->tier)][index_of(usage->kind)] |= usage->bytes;
      } else if (const auto* const ended = std::get_if<StepEvent>(&event)) {
        step = ended->number;
      } else if (const auto* const totals = std::get_if<StepTotals>(&event)) {
        totals_[step] = *totals;
      }
    }
  }

  void write() {
    out_ << "{\"traceEvents\":[";
    name_group(program_group, "program");
    name_group(links_group, "links");
    write_slices(program_group, "steps", slices_of<StepEvent>());
    write_slices(program_group, "stalls", slices_of<StallEvent>());
    write_slices(program_group, "update", slices_of<UpdateEvent>());
    for (const Link link : all_links) {
      write_slices(links_group, name_of(link),
                   transfers([&](const TransferRecord& each) { return crosses(each, link); }));
    }
    write_slices(links_group, "begun", transfers([](const TransferRecord& each) { return each.fill; }));
    write_counters();
    out_ << "\n],\n\"displayTimeUnit\":\"ms\",\n\"otherData\":" << other_data() << "}\n";
  }

 private:
  static constexpr int rows_a_track = 1000;  ///< numbers that are set aside for it

  static bool crosses(const TransferRecord& transfer, Link link) {
    const bool from_device = transfer.from == Tier::device;
    const bool from_nvme = transfer.from == Tier::nvme;
    switch (link) {
      case Link::nvme_to_host:
        return !transfer.fill && from_nvme;
      case Link::host_to_nvme:
        return !transfer.fill && transfer.to == Tier::nvme;
      case Link::host_to_device:
        return !transfer.fill && transfer.to == Tier::device;
      case Link::device_to_host:
        break;
    }
    return !transfer.fill && from_device;
  }

  template <class Event>
  std::vector<Slice> slices_of() const {
    std::vector<Slice> slices;
    for (const TimelineEvent& event : timeline_.events) {
      if (const auto* const found = std::get_if<Event>(&event)) {
        slices.push_back({found->begin_ns, found->end_ns, &event});
      }
    }
    return slices;
  }

  template <class Belongs>
  std::vector<Slice> transfers(Belongs&& belongs) const {
    std::vector<Slice> slices;
    for (const TimelineEvent& event : timeline_.events) {
      const auto* const found = std::get_if<TransferRecord>(&event);
      if (found != nullptr && belongs(*found)) {
        slices.push_back({found->started_ns == 0 ? found->ended_ns : found->started_ns, found->ended_ns, &event});
      }
    }
    return slices;
  }

  /// Each slice goes on the first row that is free when it begins.
  void write_slices(int group, std::string_view track, std::vector<Slice> slices) {
    const int first_row = ++tracks_ * rows_a_track;
    std::stable_sort(slices.begin(), slices.end(),
                     [](const Slice& a, const Slice& b) { return a.begin_ns < b.begin_ns; });
    std::vector<std::int64_t> free_from;
    for (const Slice& slice : slices) {
      const auto free = std::find_if(free_from.begin(), free_from.end(),
                                     [&](std::int64_t from_ns) { return from_ns <= slice.begin_ns; });
      const auto row = static_cast<std::size_t>(free - free_from.begin());
      if (free == free_from.end()) {
        free_from.push_back(0);
      }
      free_from[row] = slice.end_ns;
      write_slice(slice, group, track, first_row + static_cast<int>(row));
    }
    for (std::size_t row = 0; row < std::max<std::size_t>(free_from.size(), 1); ++row) {
      name_row(group, first_row + static_cast<int>(row),
               std::string(track) + (row == 0 ? "" : " " + std::to_string(row + 1)));
    }
  }

  void name_group(int group, std::string_view name) {
    begin_event("M", group, "process_name") << ",\"args\":" << JsonObject().add("name", name).text() << "}";
    begin_event("M", group, "process_sort_index") << ",\"args\":{\"sort_index\":" << group << "}}";
  }

  void name_row(int group, int row, const std::string& name) {
    begin_event("M", group, "thread_name")
        << ",\"tid\":" << row << ",\"args\":" << JsonObject().add("name", name).text() << "}";
    begin_event("M", group, "thread_sort_index") << ",\"tid\":" << row << ",\"args\":{\"sort_index\":" << row << "}}";
  }

  void write_slice(const Slice& slice, int group, std::string_view track, int row) {
    const auto [name, category, arguments] =
        std::visit([&](const auto& event) { return describe(event, track); }, *slice.event);
    begin_event("X", group, name) << ",\"cat\":\"" << category << "\",\"tid\":" << row
                                  << ",\"ts\":" << json_microseconds(slice.begin_ns - timeline_.origin_ns)
                                  << ",\"dur\":" << json_microseconds(slice.end_ns - slice.begin_ns)
                                  << ",\"args\":" << arguments.text() << "}";
  }

  struct Description {
    std::string name;
    std::string_view category;
    JsonObject arguments;
  };

  static Description describe(const TransferRecord& transfer, std::string_view track) {
    JsonObject arguments;
    arguments.add("bytes", transfer.bytes);
    if (!transfer.fill) {
      arguments.add("link", track).add("from", name_of(transfer.from));
    }
    arguments.add("to", name_of(transfer.to))
        .add("priority", name_of(transfer.priority))
        .raw("queued_us", json_microseconds(std::max(transfer.started_ns, transfer.queued_ns) - transfer.queued_ns))
        .raw("failed", transfer.failed ? "true" : "false");
    return {name_of(ChunkName{transfer.kind, transfer.index}), transfer.fill ? "begun" : "transfer", arguments};
  }
  static Description describe(const StallEvent& stall, std::string_view) {
    JsonObject arguments;
    if (*stall.op != '\0') {
      arguments.add("op", stall.op);
    }
    if (stall.chunk) {
      arguments.add("chunk", name_of(*stall.chunk));
    }
    return {std::string(name_of(stall.cause)), "stall", arguments};
  }
  Description describe(const StepEvent& step, std::string_view) const {
    JsonObject arguments;
    arguments.add("number", step.number);
    if (const auto found = totals_.find(step.number); found != totals_.end()) {
      JsonObject moved;
      for (const Link link : all_links) {
        moved.add(name_of(link), found->second.bytes_moved[index_of(link)]);
      }
      arguments.raw("stall_us_so_far", json_microseconds(found->second.stall_ns));
      arguments.raw("bytes_moved_so_far", moved.text());
    }
    return {"step " + std::to_string(step.number), "step", arguments};
  }
  static Description describe(const UpdateEvent& update, std::string_view) {
    return {update.set ? "update " + std::to_string(*update.set) : "norm", "update", {}};
  }
  static Description describe(const StepTotals&, std::string_view) { return {}; }
  static Description describe(const UsageEvent&, std::string_view) { return {}; }

  void write_counters() {
    UsageByKind usage = timeline_.usage;
    for (const Tier tier : all_tiers) {
      if (is_shown(tier)) {
        name_group(group_of(tier), name_of(tier));
        write_usage(tier, timeline_.complete_since_ns, usage, 0);
      }
    }
    for (std::size_t at = 0; at < timeline_.events.size(); ++at) {
      const auto* const event = std::get_if<UsageEvent>(&timeline_.events[at]);
      if (event == nullptr) {
        continue;
      }
      usage[index_of(event->tier)][index_of(event->kind)] = event->bytes;
      const bool is_last = at + 1 == timeline_.events.size();
      const auto* const next = is_last ? nullptr : std::get_if<UsageEvent>(&timeline_.events[at + 1]);
      if (next == nullptr || next->at_ns != event->at_ns || next->tier != event->tier) {
        write_usage(event->tier, event->at_ns, usage, event->tier_peak);
      }
    }
  }

  bool is_shown(Tier tier) const { return timeline_.budgets[index_of(tier)] > 0; }

  void write_usage(Tier tier, std::int64_t at_ns, const UsageByKind& usage, std::uint64_t peak) {
    JsonObject kinds;
    std::uint64_t total = 0;
    for (const Kind kind : all_kinds) {
      const std::uint64_t bytes = usage[index_of(tier)][index_of(kind)];
      total += bytes;
      if (ever_used_[index_of(tier)][index_of(kind)] != 0) {
        kinds.add(name_of(kind), bytes);
      }
    }
    write_counter(tier, "bytes", at_ns, kinds);
    write_counter(tier, "total", at_ns, JsonObject().add("bytes", total));
    write_counter(tier, "peak", at_ns, JsonObject().add("bytes", std::max(peak, total)));
    write_counter(tier, "budget", at_ns, JsonObject().add("bytes", timeline_.budgets[index_of(tier)]));
  }

  void write_counter(Tier tier, const char* what, std::int64_t at_ns, const JsonObject& values) {
    begin_event("C", group_of(tier), std::string(name_of(tier)) + " " + what)
        << ",\"ts\":" << json_microseconds(at_ns - timeline_.origin_ns) << ",\"args\":" << values.text() << "}";
  }

  std::ostream& begin_event(std::string_view phase, int group, std::string_view name) {
    return out_ << (std::exchange(is_first_, false) ? "\n" : ",\n") << "{\"ph\":\"" << phase << "\",\"pid\":" << group
                << ",\"name\":" << json_quoted(name);
  }

  std::string other_data() const {
    JsonObject budgets;
    for (const Tier tier : all_tiers) {
      budgets.add(name_of(tier), timeline_.budgets[index_of(tier)]);
    }
    return JsonObject()
        .add("version", std::uint64_t{format_version})
        .raw("budget_bytes", budgets.text())
        .add("dropped_events", timeline_.dropped)
        .raw("complete_since_us", json_microseconds(timeline_.complete_since_ns - timeline_.origin_ns))
        .text();
  }

  const TimelineSnapshot& timeline_;
  std::ostream& out_;
  UsageByKind ever_used_;                       ///< not 0 for the kinds that are to be shown
  std::map<std::uint64_t, StepTotals> totals_;  ///< by the step's number
  int tracks_ = 0;
  bool is_first_ = true;
};

}  // namespace

void write_trace(const TimelineSnapshot& timeline, std::ostream& out) { TraceWriter(timeline, out).write(); }

}  // namespace terrace
