#include "memory/timeline_trace.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace terrace {
namespace {

constexpr int format_version = 1;

std::string quoted(std::string_view text) {
  std::string result = "\"";
  for (const char each : text) {
    if (static_cast<unsigned char>(each) < 0x20) {
      result += ' ';
      continue;
    }
    if (each == '"' || each == '\\') {
      result += '\\';
    }
    result += each;
  }
  return result + '"';
}

std::string microseconds(std::int64_t ns) {
  char text[40];
  std::snprintf(text, sizeof text, "%lld.%03d", static_cast<long long>(ns / 1000), static_cast<int>(ns % 1000));
  return text;
}

std::string name_of(const ChunkName& chunk) {
  return std::string(name_of(chunk.kind)) + " " + std::to_string(chunk.index);
}

std::string_view name_of(TransferPriority priority) {
  constexpr std::array<std::string_view, transfer_priority_count> names{"demand", "prefetch", "write back", "early"};
  return names[static_cast<std::size_t>(priority)];
}

/// The members of an object that follow one another.
class Members {
 public:
  Members& add(std::string_view key, std::string_view value) { return raw(key, quoted(value)); }
  Members& add(std::string_view key, std::uint64_t value) { return raw(key, std::to_string(value)); }
  Members& raw(std::string_view key, std::string_view value) {
    text_ += (text_.empty() ? "" : ",") + quoted(key) + ":";
    text_ += value;
    return *this;
  }
  std::string object() const { return "{" + text_ + "}"; }

 private:
  std::string text_;
};

/// One bar of a track.
struct Slice {
  std::int64_t begin_ns;
  std::int64_t end_ns;
  const TimelineEvent* event;
};

class TraceWriter {
 public:
  TraceWriter(const TimelineSnapshot& timeline, std::ostream& out) : timeline_(timeline), out_(out) {}

  void write() {
    out_ << "{\"traceEvents\":[\n{\"ph\":\"M\",\"pid\":1,\"name\":\"process_name\",\"args\":{\"name\":\"terrace\"}}";
    write_slices("steps", slices_of<StepEvent>());
    write_slices("stalls", slices_of<StallEvent>());
    write_slices("update", slices_of<UpdateEvent>());
    for (const Link link : all_links) {
      write_slices(name_of(link), transfers([&](const TransferRecord& each) { return crosses(each, link); }));
    }
    write_slices("zeroed", transfers([](const TransferRecord& each) { return each.fill; }));
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
  void write_slices(std::string_view track, std::vector<Slice> slices) {
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
      write_slice(slice, track, first_row + static_cast<int>(row));
    }
    for (std::size_t row = 0; row < std::max<std::size_t>(free_from.size(), 1); ++row) {
      name_row(first_row + static_cast<int>(row), std::string(track) + (row == 0 ? "" : " " + std::to_string(row + 1)));
    }
  }

  void name_row(int row, const std::string& name) {
    const auto write = [&](std::string_view what, const std::string& arguments) {
      begin_event("M", what) << ",\"tid\":" << row << ",\"args\":" << arguments << "}";
    };
    write("thread_name", Members().add("name", name).object());
    write("thread_sort_index", Members().raw("sort_index", std::to_string(row)).object());
  }

  void write_slice(const Slice& slice, std::string_view track, int row) {
    const auto [name, category, arguments] =
        std::visit([&](const auto& event) { return describe(event, track); }, *slice.event);
    begin_event("X", name) << ",\"cat\":\"" << category << "\",\"tid\":" << row
                           << ",\"ts\":" << microseconds(slice.begin_ns - timeline_.origin_ns)
                           << ",\"dur\":" << microseconds(slice.end_ns - slice.begin_ns)
                           << ",\"args\":" << arguments.object() << "}";
  }

  struct Description {
    std::string name;
    std::string_view category;
    Members arguments;
  };

  static Description describe(const TransferRecord& transfer, std::string_view track) {
    Members arguments;
    arguments.add("bytes", transfer.bytes);
    if (!transfer.fill) {
      arguments.add("link", track).add("from", name_of(transfer.from));
    }
    arguments.add("to", name_of(transfer.to))
        .add("priority", name_of(transfer.priority))
        .raw("queued_us", microseconds(std::max(transfer.started_ns, transfer.queued_ns) - transfer.queued_ns))
        .raw("failed", transfer.failed ? "true" : "false");
    return {name_of(ChunkName{transfer.kind, transfer.index}), transfer.fill ? "zeroed" : "transfer", arguments};
  }
  static Description describe(const StallEvent& stall, std::string_view) {
    Members arguments;
    if (*stall.op != '\0') {
      arguments.add("op", stall.op);
    }
    if (stall.chunk) {
      arguments.add("chunk", name_of(*stall.chunk));
    }
    return {std::string(name_of(stall.cause)), "stall", arguments};
  }
  static Description describe(const StepEvent& step, std::string_view) {
    return {"step " + std::to_string(step.number), "step", Members().add("number", step.number)};
  }
  static Description describe(const UpdateEvent& update, std::string_view) {
    return {update.set ? "update " + std::to_string(*update.set) : "norm", "update", {}};
  }
  static Description describe(const UsageEvent&, std::string_view) { return {}; }

  void write_counters() {
    UsageByKind usage = timeline_.usage;
    const UsageByKind ever = ever_used();
    for (const Tier tier : all_tiers) {
      if (timeline_.budgets[index_of(tier)] > 0) {
        write_usage(tier, timeline_.complete_since_ns, usage, ever);
      }
    }
    for (std::size_t at = 0; at < timeline_.events.size(); ++at) {
      const auto* const event = std::get_if<UsageEvent>(&timeline_.events[at]);
      if (event == nullptr) {
        continue;
      }
      usage[index_of(event->tier)][index_of(event->kind)] = event->bytes;
      const auto* const next =
          at + 1 < timeline_.events.size() ? std::get_if<UsageEvent>(&timeline_.events[at + 1]) : nullptr;
      if (next == nullptr || next->at_ns != event->at_ns || next->tier != event->tier) {
        write_usage(event->tier, event->at_ns, usage, ever);
        write_counter(event->tier, " peak bytes", event->at_ns, Members().add("peak", event->tier_peak));
      }
    }
  }

  /// Which kinds are to be shown: those that are not 0 throughout.
  UsageByKind ever_used() const {
    UsageByKind ever = timeline_.usage;
    for (const TimelineEvent& event : timeline_.events) {
      if (const auto* const usage = std::get_if<UsageEvent>(&event)) {
        ever[index_of(usage->tier)][index_of(usage->kind)] |= usage->bytes;
      }
    }
    return ever;
  }

  void write_usage(Tier tier, std::int64_t at_ns, const UsageByKind& usage, const UsageByKind& ever) {
    Members kinds;
    for (const Kind kind : all_kinds) {
      if (ever[index_of(tier)][index_of(kind)] != 0) {
        kinds.add(name_of(kind), usage[index_of(tier)][index_of(kind)]);
      }
    }
    write_counter(tier, " bytes", at_ns, kinds);
  }

  void write_counter(Tier tier, std::string_view of, std::int64_t at_ns, const Members& values) {
    begin_event("C", std::string(name_of(tier)).append(of))
        << ",\"ts\":" << microseconds(at_ns - timeline_.origin_ns) << ",\"args\":" << values.object() << "}";
  }

  std::ostream& begin_event(std::string_view phase, std::string_view name) {
    return out_ << ",\n{\"ph\":\"" << phase << "\",\"pid\":1,\"name\":" << quoted(name);
  }

  std::string other_data() const {
    Members budgets;
    for (const Tier tier : all_tiers) {
      budgets.add(name_of(tier), timeline_.budgets[index_of(tier)]);
    }
    return Members()
        .add("version", std::uint64_t{format_version})
        .raw("budget_bytes", budgets.object())
        .add("dropped_events", timeline_.dropped)
        .raw("complete_since_us", microseconds(timeline_.complete_since_ns - timeline_.origin_ns))
        .object();
  }

  const TimelineSnapshot& timeline_;
  std::ostream& out_;
  int tracks_ = 0;
};

}  // namespace

void write_trace(const TimelineSnapshot& timeline, std::ostream& out) { TraceWriter(timeline, out).write(); }

}  // namespace terrace
