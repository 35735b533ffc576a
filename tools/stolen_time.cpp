#include "tools/stolen_time.h"

#include <algorithm>
#include <fstream>
#include <string>
#include <unistd.h>

#include "base/clock.h"
#include "base/machine.h"

namespace terrace {

double stolen_core_seconds(const std::filesystem::path& root) {
  std::ifstream file(root / "proc/stat");
  std::string word;
  file >> word;  // "cpu": of all of them; then user, nice, system, idle, iowait, irq, softirq and steal
  double ticks = 0;
  for (int field = 0; field < 8; ++field) file >> ticks;
  return file && word == "cpu" ? ticks / static_cast<double>(::sysconf(_SC_CLK_TCK)) : 0;
}

double StolenTime::share() const { return seconds_ > 0 ? std::clamp(stolen_ / seconds_, 0.0, 1.0) : 0; }

StolenTime::Moment StolenTime::now() {
  return {.stolen = stolen_core_seconds(), .seconds = static_cast<double>(monotonic_ns()) * 1e-9};
}

void StolenTime::count_since(const Moment& begin) {
  const Moment end = now();
  seconds_ += (end.seconds - begin.seconds) * static_cast<double>(machine_threads());
  stolen_ += end.stolen - begin.stolen;
}

}  // namespace terrace
