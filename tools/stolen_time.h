/// What a virtual machine's cores wanted to run and its host gave to others ("steal" in /proc/stat), as a share of
/// their time while something was measured: a step that is slow for that is not slow for what it does.
#pragma once

#include <filesystem>

namespace terrace {

/// Of all cores together, in seconds, counted from the machine's start in ticks of 10 ms. 0 where the system does not
/// say. `root` is where its files are, for tests.
double stolen_core_seconds(const std::filesystem::path& root = "/");

class StolenTime {
 public:
  /// Returns what `call()` does; what was stolen meanwhile counts.
  template <class Call>
  auto during(Call&& call) {
    const Moment begin = now();
    auto result = call();
    count_since(begin);
    return result;
  }

  /// In [0, 1]; 0 where nothing was counted.
  double share() const;

 private:
  struct Moment {
    double stolen;
    double seconds;
  };
  static Moment now();
  void count_since(const Moment& begin);

  double stolen_ = 0;
  double seconds_ = 0;  ///< of all cores
};

}  // namespace terrace
