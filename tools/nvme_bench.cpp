#include "tools/nvme_bench.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <functional>
#include <optional>
#include <pthread.h>
#include <random>
#include <string>
#include <sys/resource.h>
#include <thread>
#include <time.h>
#include <utility>

#include <ATen/Parallel.h>
#include <nlohmann/json.hpp>

#include "base/units.h"
#include "tools/bare_nvme.h"
#include "tools/bench_report.h"
#include "tools/formatted.h"
#include "tools/interrupt.h"
#include "tools/nvme_sides.h"
#include "tools/paired.h"
#include "tools/text_table.h"

namespace terrace {
namespace {

/// The format; it goes up when a field changes its meaning.
constexpr int kVersion = 2;

double processor_seconds() {
  struct rusage usage {};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

/// Threads that compute while this lives, one for each core.
class Load {
 public:
  explicit Load(bool on) {
    for (unsigned i = 0; on && i < std::thread::hardware_concurrency(); ++i) {
      threads_.emplace_back([this](const std::stop_token& stop) {
        while (!stop.stop_requested()) ++spins_;
      });
    }
  }

  /// The time of processors that they have taken.
  double processor_seconds() {
    double seconds = 0;
    for (std::jthread& thread : threads_) {
      clockid_t clock{};
      timespec time{};
      ::pthread_getcpuclockid(thread.native_handle(), &clock);
      ::clock_gettime(clock, &time);
      seconds += static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
    }
    return seconds;
  }

 private:
  std::atomic<std::uint64_t> spins_{0};
  std::vector<std::jthread> threads_;
};

/// What one side did in all of its samples.
struct Samples {
  std::vector<double> rates;              // bytes a second
  std::vector<double> processor_seconds;  // a gigabyte

  /// What the load takes meanwhile is not this side's.
  void take(std::uint64_t bytes, Load& load, const std::function<double()>& seconds) {
    const double before = terrace::processor_seconds() - load.processor_seconds();
    rates.push_back(static_cast<double>(bytes) / seconds());
    const double after = terrace::processor_seconds() - load.processor_seconds();
    processor_seconds.push_back((after - before) / (1e-9 * static_cast<double>(bytes)));
  }
};

std::vector<double> ratios(const std::vector<double>& of, const std::vector<double>& to) {
  std::vector<double> result;
  for (std::size_t i = 0; i < of.size(); ++i) result.push_back(of[i] / to[i]);
  return result;
}

struct Case {
  std::string name;
  NvmeLoad load;
  bool busy = false;
  Samples service, engine, bare, bare_with_checksums, bare_beside_checksums;
  std::vector<double> fio;  // bytes a second, once a round; empty where there is none
  double depth_share = 0;
  std::size_t threads_with_checksums = 0;  ///< of the loops with checksums

  /// Of the service's rate to the best of the others': sample by sample, or round by round where that is fio.
  Interval share_of_best() const {
    if (fio.empty() || median_of(bare.rates) >= median_of(fio))
      return median_interval(ratios(service.rates, bare.rates));
    const std::size_t samples = service.rates.size() / fio.size();
    std::vector<double> rounds;
    for (auto at = service.rates.begin(); at != service.rates.end(); at += static_cast<std::ptrdiff_t>(samples)) {
      rounds.push_back(median_of({at, at + static_cast<std::ptrdiff_t>(samples)}));
    }
    return median_interval(ratios(rounds, fio));
  }
  /// Of the service's rate to that of a loop that shares the machine with checksums, but never waits for them.
  Interval share_beside_checksums() const {
    return median_interval(ratios(service.rates, bare_beside_checksums.rates));
  }
};

/// Nothing where there was an interrupt before its end.
std::optional<Case> measure(const BenchNvmeOptions& options, const std::string& kind, std::uint64_t block,
                            std::uint64_t depth, const Interrupt& interrupt) {
  Case result;
  result.busy = options.busy;
  result.name =
      kind + " " + format_bytes_exactly(block) + " x " + std::to_string(depth) + (options.busy ? ", busy" : "");
  result.load = {.read_bytes = kind == "write" ? 0 : options.bytes,
                 .written_bytes = kind == "read" ? 0 : options.bytes,
                 .block_bytes = static_cast<std::size_t>(block),
                 .depth = static_cast<std::size_t>(depth)};
  const std::uint64_t bytes = result.load.read_bytes + result.load.written_bytes;
  ServiceSide service(options.folder, result.load);
  // All on one file: drives, and what lies under them, are not equally fast everywhere.
  EngineSide engine(service, result.load);
  const BareNvme::Part part{service.file(), ServiceSide::first_offset()};
  BareNvme::Options loop{.block_bytes = result.load.block_bytes,
                         .depth = static_cast<unsigned>(depth),
                         .own_memory = true,
                         .checksums = false};
  BareNvme bare(part, result.load.read_bytes, result.load.written_bytes, loop);
  loop.checksums = true;
  // One loop for both ways tells what the drive can do; one each way, what it costs to use it as the service does.
  BareNvmeEachWay bare_with_checksums(part, result.load.read_bytes, result.load.written_bytes, loop);
  loop.checksums = false;
  BareNvmeBesideChecksums bare_beside_checksums(part, result.load.read_bytes, result.load.written_bytes, loop);
  result.threads_with_checksums = bare_with_checksums.threads();
  std::mt19937_64 order(7);
  Load load(options.busy);
  for (int round = 0; round < options.rounds; ++round) {
    const int with_fio = std::uniform_int_distribution(0, options.samples - 1)(order);
    for (int sample = 0; sample < options.samples; ++sample) {
      std::vector<std::function<void()>> turns{
          [&] { result.service.take(bytes, load, [&] { return service.seconds(); }); },
          [&] {
            result.bare.take(bytes, load,
                             [&] { return bare.seconds(result.load.read_bytes, result.load.written_bytes); });
          },
          [&] { result.engine.take(bytes, load, [&] { return engine.seconds(); }); },
          [&] { result.bare_with_checksums.take(bytes, load, [&] { return bare_with_checksums.seconds(); }); },
          [&] { result.bare_beside_checksums.take(bytes, load, [&] { return bare_beside_checksums.seconds(); }); }};
      if (sample == with_fio) {
        turns.emplace_back([&] {
          if (const auto rate = fio_bytes_per_second(service, result.load)) result.fio.push_back(*rate);
        });
      }
      // Drives let who comes after a slow one be faster for a while.
      std::shuffle(turns.begin(), turns.end(), order);
      for (const auto& turn : turns) {
        if (interrupt.requested()) return std::nullopt;
        turn();
      }
    }
    service.look();
  }
  if (result.fio.size() != static_cast<std::size_t>(options.rounds)) result.fio.clear();  // it failed
  result.depth_share = service.depth_share();
  return result;
}

nlohmann::ordered_json to_json(const Case& each) {
  const auto gigabytes = [](const Samples& samples) { return 1e-9 * median_of(samples.rates); };
  const auto share = [&](std::uint64_t part, double rate) {
    return rate * static_cast<double>(part) / static_cast<double>(each.load.read_bytes + each.load.written_bytes);
  };
  nlohmann::ordered_json json;
  json["name"] = each.name;
  json["block_bytes"] = each.load.block_bytes;
  json["depth"] = each.load.depth;
  json["busy"] = each.busy;
  json["read_gb_per_second"] = share(each.load.read_bytes, gigabytes(each.service));
  json["write_gb_per_second"] = share(each.load.written_bytes, gigabytes(each.service));
  json["gb_per_second"] = {{"service", gigabytes(each.service)},
                           {"engine", gigabytes(each.engine)},
                           {"bare", gigabytes(each.bare)},
                           {"bare_with_checksums", gigabytes(each.bare_with_checksums)},
                           {"bare_beside_checksums", gigabytes(each.bare_beside_checksums)}};
  if (!each.fio.empty()) json["gb_per_second"]["fio"] = 1e-9 * median_of(each.fio);
  json["share_of_best"] = interval_json(each.share_of_best());
  json["share_of_bare_beside_checksums"] = interval_json(each.share_beside_checksums());
  json["depth_share"] = each.depth_share;
  json["bare_with_checksums_threads"] = each.threads_with_checksums;
  json["cpu_seconds_per_gb"] = {{"service", median_of(each.service.processor_seconds)},
                                {"engine", median_of(each.engine.processor_seconds)},
                                {"bare", median_of(each.bare.processor_seconds)},
                                {"bare_with_checksums", median_of(each.bare_with_checksums.processor_seconds)},
                                {"bare_beside_checksums", median_of(each.bare_beside_checksums.processor_seconds)}};
  const auto cpu_over = [](const Samples& of, const Samples& to) {
    return interval_json(median_interval(ratios(of.processor_seconds, to.processor_seconds)));
  };
  json["cpu_over_bare"] = {{"engine", cpu_over(each.engine, each.bare)},
                           {"service", cpu_over(each.service, each.bare)},
                           {"service_over_bare_with_checksums", cpu_over(each.service, each.bare_with_checksums)},
                           {"service_over_bare_beside_checksums", cpu_over(each.service, each.bare_beside_checksums)}};
  return json;
}

std::string to_text(const std::vector<Case>& cases) {
  std::vector<std::vector<std::string>> rows{{"", "GB/s", "bare", "fio", "of the best", "of bare beside checksums",
                                              "depth", "CPU s/GB", "bare", "with checksums"}};
  for (const Case& each : cases) {
    const Interval share = each.share_of_best();
    const Interval beside = each.share_beside_checksums();
    rows.push_back({each.name, formatted("%.2f", 1e-9 * median_of(each.service.rates)),
                    formatted("%.2f", 1e-9 * median_of(each.bare.rates)),
                    each.fio.empty() ? "-" : formatted("%.2f", 1e-9 * median_of(each.fio)),
                    formatted("%.3f (%.3f to %.3f)", share.median, share.low, share.high),
                    formatted("%.3f (%.3f to %.3f)", beside.median, beside.low, beside.high),
                    formatted("%.2f", each.depth_share), formatted("%.3f", median_of(each.service.processor_seconds)),
                    formatted("%.3f", median_of(each.bare.processor_seconds)),
                    formatted("%.3f", median_of(each.bare_with_checksums.processor_seconds))});
  }
  return format_table(rows);
}

void print(const std::vector<Case>& cases, const BenchNvmeOptions& options) {
  if (!options.json) {
    std::fputs(to_text(cases).c_str(), stdout);
    return;
  }
  std::vector<nlohmann::ordered_json> list;
  for (const Case& each : cases) list.push_back(to_json(each));
  std::printf("%s\n", bench_json(kVersion, at::get_num_threads(), {{"folder", options.folder.string()}}, list).c_str());
}

}  // namespace

bool bench_nvme(const BenchNvmeOptions& options) {
  const Interrupt interrupt;
  std::vector<Case> cases;
  for (const std::uint64_t block : options.blocks) {
    for (const std::uint64_t depth : options.depths) {
      for (const char* const kind : {"read", "write", "mixed"}) {
        if (interrupt.requested()) break;
        std::optional<Case> measured = measure(options, kind, block, depth, interrupt);
        if (!measured) break;
        cases.push_back(std::move(*measured));
        if (!options.json) std::fprintf(stderr, "bench: %s\n", cases.back().name.c_str());
      }
    }
  }
  print(cases, options);
  return !interrupt.requested();
}

}  // namespace terrace
