// A drive that does wrong, met by a training loop: on each link's first, middle and last transfer of every phase, in
// parameters, states and gradients, with both engines.
//
// An undisturbed run counts the operations of a phase; then one run a fault. What a run may survive it has to survive
// with the same bits; what it may not has to reach the loop with its type, path and offset.

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <ostream>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "offload/choose_engine.h"
#include "offload/uring_engine.h"
#include "tests/base/temporary_folder.h"
#include "tests/integration/mlp.h"
#include "tests/integration/small_gpt.h"
#include "tests/offload/fault_injecting_engine.h"

namespace terrace::testing {
namespace {

using Direction = IoOperation::Direction;

/// What the training loop is at. Operations count in the step under test and at the end only.
enum class Phase : std::uint8_t { elsewhere, forward, backward, update, end };
constexpr std::array phases{Phase::forward, Phase::backward, Phase::update, Phase::end};
constexpr std::array phase_names{"elsewhere", "forward", "backward", "update", "end"};
constexpr int steps = 4;
constexpr int step_under_test = 2;  // the states are no longer zero, and a step follows

/// How to train: what lies on NVMe, and how it is worked with.
struct Setting {
  const char* on_nvme;
  const char* engine;
  const char* update;
  std::int64_t prefetch = 0;
  bool background = false;  ///< updates may run beside the program, so that operations come in no fixed order
};

void PrintTo(const Setting& setting, std::ostream* out) {
  *out << setting.on_nvme << "_" << setting.engine << "_" << setting.update;
}

struct Trouble {
  Fault fault;
  Direction direction;
  bool lasts;  ///< all further operations of the direction meet it too
  Phase phase;
  std::uint64_t nth;  ///< of the phase's operations of the direction, from 0
};

std::string name_of(const Trouble& trouble) {
  constexpr std::array faults{"EIO", "ENOSPC", "short transfer", "flipped bit"};
  return std::string(trouble.lasts ? "lasting " : "") + faults.at(static_cast<std::size_t>(trouble.fault)) +
         (trouble.direction == Direction::read ? " on read " : " on write ") + std::to_string(trouble.nth) + " of " +
         phase_names.at(static_cast<std::size_t>(trouble.phase));
}

using Counts = std::array<std::array<std::uint64_t, 2>, phase_names.size()>;  // by phase and direction

/// What is left of a run.
struct Result {
  std::vector<float> losses;                        // of the steps that went well
  std::vector<std::vector<at::Tensor>> parameters;  // before the first step and after each; undisturbed: all of them
  Counts counts{};
  std::vector<InjectedFault> injected;
  std::exception_ptr error;  // typed; the first that reached the loop
  Phase failed_in = Phase::elsewhere;
  int updates_begun = 0;
  bool repeated = false;       // the step that failed, and with success
  std::size_t unreadable = 0;  // parameters, afterwards
  double seconds_to_end = 0;   // from the first fault to the end of the session
  bool used_again = false;     // the place on the drive where the first fault happened
};

constexpr std::int64_t width = 256;

std::vector<at::Tensor> copies_of(const torch::nn::Module& model) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> copies;
  for (const at::Tensor& parameter : model.parameters()) {
    copies.push_back(parameter.clone());
  }
  return copies;
}

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Config config_for(const Setting& setting, const std::filesystem::path& folder) {
  const std::string on_nvme = setting.on_nvme;
  const auto home = [&](const char* kind) {
    return std::string("placement.") + kind + (on_nvme == kind ? "={nvme=1}" : "={host=1}");
  };
  Config config = Config::parse(
      "", "faults",
      {"nvme.paths=[\"" + folder.string() + "\"]", home("parameters"), home("gradients"), home("optimizer"),
       std::string("io.engine=") + setting.engine, std::string("optimizer.update=") + setting.update});
  config.placement.chunk = 256 << 10;  // a weight; in granules of two pages, so that a half of one can move
  config.device.memory = 8 << 20;
  config.device.chunks = 560 << 10;  // a weight and its gradient
  config.nvme.memory = 6 << 20;
  const std::uint64_t chunk_room = (256 << 10) + (16 << 10);
  const std::uint64_t resting = on_nvme == "optimizer" ? 2 : 3;  // kinds, with 4 layers each
  const std::uint64_t working = on_nvme == "optimizer" ? 3 : 2;  // chunks; fewer than there are
  config.host.memory = 64 * 1024 + (resting * 4 + working) * chunk_room;
  config.timeline.memory = 0;
  config.io.prefetch = setting.prefetch;
  config.log.level = LogLevel::error;
  return config;
}

class Faults : public ::testing::Test {
 protected:
  ~Faults() override {
    decorate_io_engines(nullptr);
    at::set_num_threads(threads_before_);
  }

  /// A run without a session, with the threads of `setting`: before the first session that it is compared with.
  static const Result& unmanaged(const Setting& setting) {
    static std::array<std::optional<Result>, 2> results;
    std::optional<Result>& result = results.at(setting.background ? 1 : 0);
    if (!result) {
      at::set_num_threads(threads_of(setting));
      train(nullptr, setting, result.emplace(), [](Phase) {});
    }
    return *result;
  }
  /// While there are fewer than cores, updates run in the background.
  static int threads_of(const Setting& setting) {
    return setting.background ? 1 : static_cast<int>(std::thread::hardware_concurrency());
  }

  Result run(const Setting& setting, const std::optional<Trouble>& trouble) {
    unmanaged(setting);
    at::set_num_threads(threads_of(setting));
    Result result;
    std::atomic<Phase> phase{Phase::elsewhere};
    double fault_seconds = 0;
    std::uint64_t fault_offset = 0;
    FaultInjectingEngine* engine = nullptr;
    const auto applies = [&](const IoOperation& operation) {
      const std::size_t direction = operation.direction == Direction::read ? 0 : 1;
      const Phase now = phase;
      const std::uint64_t number = result.counts[static_cast<std::size_t>(now)][direction]++;
      result.used_again = result.used_again || (fault_seconds > 0 && operation.offset == fault_offset);
      if (!trouble || operation.direction != trouble->direction) {
        return false;
      }
      if (fault_seconds > 0) {
        return trouble->lasts;
      }
      if (now != trouble->phase || number != trouble->nth) {
        return false;
      }
      fault_seconds = now_seconds();
      fault_offset = operation.offset;
      return true;
    };
    decorate_io_engines([&](std::unique_ptr<IoEngine> plain) {
      auto decorated = std::make_unique<FaultInjectingEngine>(std::move(plain));
      engine = decorated.get();
      engine->inject({.fault = trouble ? trouble->fault : Fault::io_error, .when = applies});
      return decorated;
    });
    {
      Session session(config_for(setting, folder_.path()));
      train(&session, setting, result, [&](Phase now) { phase = now; });
      phase = Phase::elsewhere;
      check_budgets(session.memory_usage());
      result.injected = engine->injected();
    }
    result.seconds_to_end = fault_seconds > 0 ? now_seconds() - fault_seconds : 0;
    return result;
  }

  /// The loop. Does not throw what training does; looks at every parameter when it has ended.
  template <class SetPhase>
  static void train(Session* session, const Setting& setting, Result& result, const SetPhase& set_phase) {
    torch::manual_seed(7);
    const auto build = [] { return std::make_shared<Mlp>(4, width); };
    const std::shared_ptr<Mlp> model = session != nullptr ? session->construct(build) : build();
    const auto options = torch::optim::AdamWOptions(1e-2).weight_decay(0.1);
    std::optional<AdamW> optimizer;
    if (session != nullptr) {
      session->manage(*model);
      optimizer.emplace(*session, options);
    } else {
      optimizer.emplace(model->parameters(), options);
    }
    optimizer->max_gradient_norm(0.5);
    auto generator = at::make_generator<at::CPUGeneratorImpl>(11);
    Phase at = Phase::elsewhere;
    const auto enter = [&](Phase phase, int step) {
      at = phase;
      set_phase(step == step_under_test ? phase : Phase::elsewhere);
    };
    const auto train_step = [&](int step, const at::Tensor& x, const at::Tensor& y) {
      enter(Phase::forward, step);
      const at::Tensor loss = torch::mse_loss(model->features(x), y);
      enter(Phase::backward, step);
      loss.backward();
      enter(Phase::update, step);
      ++result.updates_begun;
      optimizer->step();
      if (session != nullptr && step == step_under_test) {
        session->synchronize();
      }
      optimizer->zero_grad();
      enter(Phase::elsewhere, step);
      result.losses.push_back(loss.item<float>());
    };
    try {
      if (session == nullptr) {
        result.parameters.push_back(copies_of(*model));
      }
      for (int step = 0; step < steps; ++step) {
        const at::Tensor x = torch::randn({8, width}, generator);
        const at::Tensor y = torch::randn({8, width}, generator);
        try {
          train_step(step, x, y);
        } catch (const std::exception&) {
          if (!may_go_on(setting, at)) {
            throw;
          }
          remember(session, result, at);
          optimizer->zero_grad();
          train_step(step, x, y);
          result.repeated = true;
        }
        if (session == nullptr) {
          result.parameters.push_back(copies_of(*model));
        }
      }
      enter(Phase::end, step_under_test);
      if (session != nullptr) {
        session->synchronize();
      }
      enter(Phase::elsewhere, step_under_test);
    } catch (const std::exception&) {
      remember(session, result, at);
    }
    set_phase(Phase::elsewhere);
    if (session != nullptr) {
      look_at_parameters(*session, setting, *model, result);
    }
  }

  /// Whether no update was under way, so that a program can catch the error and go on.
  static bool may_go_on(const Setting& setting, Phase failed_in) {
    return failed_in == Phase::backward || (failed_in == Phase::forward && setting.update == std::string("immediate"));
  }

  /// Keeps the typed error: ops throw LibTorch's, and why they failed is with the session.
  static void remember(Session* session, Result& result, Phase at) {
    if (result.error) {
      return;
    }
    result.failed_in = at;
    result.error = std::current_exception();
    try {
      throw;
    } catch (const Error&) {
    } catch (const c10::Error& error) {
      if (session != nullptr && session->last_error()) {
        result.error = session->last_error();
        // What ops say is what the session knows.
        EXPECT_THAT(std::string(error.what()), ::testing::HasSubstr(text_of(result.error)));
      }
    }
  }

  static std::string text_of(const std::exception_ptr& error) {
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& exception) {
      return exception.what();
    }
  }

  /// A parameter has the bytes of before or after the update that is under way, or cannot be had.
  static void look_at_parameters(Session& session, const Setting& setting, const Mlp& model, Result& result) {
    const at::NoGradGuard no_grad;
    const auto& expected = unmanaged(setting).parameters;
    const auto last = static_cast<std::size_t>(result.updates_begun);
    const bool in_between = result.error && !result.repeated && last > 0;
    const std::vector<at::Tensor> parameters = model.parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      at::Tensor copy;
      try {
        copy = parameters[i].clone();
      } catch (const c10::Error&) {
        ++result.unreadable;
        EXPECT_TRUE(is_io_error(session.last_error()) || is_corrupt(session.last_error()));
        remember(&session, result, Phase::end);
        continue;
      }
      EXPECT_TRUE(same_bits(copy, expected[last][i]) || (in_between && same_bits(copy, expected[last - 1][i])))
          << "parameter " << i << " has bytes that it never had";
    }
  }

  template <class Type>
  static bool is(const std::exception_ptr& error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const Type&) {
      return true;
    } catch (...) {
    }
    return false;
  }
  static bool is_io_error(const std::exception_ptr& error) { return is<IoError>(error); }
  static bool is_corrupt(const std::exception_ptr& error) { return is<CorruptData>(error); }

  static void check_budgets(const MemoryUsage& usage) {
    for (const Tier tier : all_tiers) {
      EXPECT_LE(usage.now(tier), usage.capacity(tier)) << terrace::name_of(tier);
      EXPECT_LE(usage.peak(tier), usage.capacity(tier)) << terrace::name_of(tier);
      std::uint64_t sum = 0;
      for (const Kind kind : all_kinds) {
        sum += usage.now(tier, kind);
      }
      EXPECT_EQ(sum, usage.now(tier)) << terrace::name_of(tier);
    }
  }

  /// Of a run that was disturbed.
  static void check(const Setting& setting, const Trouble& trouble, const Result& result) {
    const bool fixed = !setting.background;  // operations come in a fixed order, on demand only
    EXPECT_LT(result.seconds_to_end, 5);
    if (!result.error) {
      EXPECT_EQ(result.losses, unmanaged(setting).losses);
      EXPECT_EQ(result.unreadable, 0u);
    } else {
      EXPECT_TRUE(trouble.fault == Fault::flipped_bit ? is_corrupt(result.error) : is_io_error(result.error));
      const std::string text = text_of(result.error);
      EXPECT_TRUE(std::any_of(result.injected.begin(), result.injected.end(), [&](const InjectedFault& fault) {
        return text.find(fault.path) != std::string::npos &&
               text.find("offset " + std::to_string(fault.offset) + " ") != std::string::npos;
      })) << text;
    }
    if (result.repeated) {
      EXPECT_EQ(result.losses, unmanaged(setting).losses);
    }
    if (trouble.direction == Direction::read) {
      EXPECT_TRUE(result.error || !fixed) << "the bytes were needed";
      if (may_go_on(setting, result.failed_in)) {
        EXPECT_TRUE(result.repeated) << "the second time these bytes can be read";
      }
    } else if (trouble.fault != Fault::flipped_bit) {
      EXPECT_TRUE(trouble.lasts || !result.error) << "there are other places";
      // What is written ahead of need, and fails, stays where it was: nobody may need the room any more.
      EXPECT_TRUE(!trouble.lasts || result.error || !fixed) << "somebody needed the room";
      EXPECT_FALSE(result.used_again) << "it was marked bad";
    } else {
      EXPECT_LE(result.unreadable, result.failed_in == Phase::elsewhere ? 0u : 8u);
    }
  }

  struct Summary {
    int runs = 0;
    int fired = 0;
    int refused = 0;
    int repeated = 0;
    int survived = 0;
  };

  /// In what order write-backs end may change which chunk leaves next, and with that how many operations a phase has.
  /// A run that had fewer than were counted is repeated, after some attempts with an earlier one of them disturbed.
  void run_and_check(const Setting& setting, Trouble trouble, Summary& summary) {
    Result result = run(setting, trouble);
    for (int attempt = 1; attempt < 10 && result.injected.empty(); ++attempt) {
      if (attempt >= 3) {
        trouble.nth /= 2;
      }
      result = run(setting, trouble);
    }
    SCOPED_TRACE(name_of(trouble));
    ++summary.runs;
    if (result.injected.empty()) {
      EXPECT_TRUE(setting.background) << "the fault never happened";
      return;
    }
    ++summary.fired;
    ++(result.repeated ? summary.repeated : result.error ? summary.refused : summary.survived);
    check(setting, trouble, result);
  }

  Summary run_all(const Setting& setting, const Counts& counts, std::span<const int> positions) {
    Summary summary;
    for (const Phase phase : phases) {
      for (const Direction direction : {Direction::read, Direction::write}) {
        const std::uint64_t count = counts[static_cast<std::size_t>(phase)][direction == Direction::read ? 0 : 1];
        std::set<std::uint64_t> places;
        for (const int position : positions) {
          if (count > 0) {
            places.insert((count - 1) * static_cast<std::uint64_t>(position) / 2);
          }
        }
        for (const std::uint64_t nth : places) {
          for (const Fault fault : {Fault::io_error, Fault::no_space, Fault::short_transfer, Fault::flipped_bit}) {
            if (direction == Direction::read && fault == Fault::no_space) {
              continue;
            }
            run_and_check(setting, {fault, direction, false, phase, nth}, summary);
            if (direction == Direction::write && fault != Fault::flipped_bit) {
              run_and_check(setting, {fault, direction, true, phase, nth}, summary);
            }
          }
        }
      }
    }
    return summary;
  }

  static void print(const Setting& setting, const Counts& counts, const Summary& summary) {
    std::printf("%s on nvme, %s, %s%s: operations", setting.on_nvme, setting.engine, setting.update,
                setting.background ? ", prefetch and background" : "");
    for (const Phase phase : phases) {
      const auto& count = counts[static_cast<std::size_t>(phase)];
      std::printf(" %s %llu+%llu", phase_names[static_cast<std::size_t>(phase)],
                  static_cast<unsigned long long>(count[0]), static_cast<unsigned long long>(count[1]));
    }
    std::printf("; %d runs, %d met the fault: %d refused, %d repeated the step, %d survived\n", summary.runs,
                summary.fired, summary.refused, summary.repeated, summary.survived);
  }

  /// Operations of an undisturbed run, which has to give the bits of an unmanaged one.
  Counts undisturbed(const Setting& setting) {
    const Result result = run(setting, std::nullopt);
    EXPECT_EQ(result.error, nullptr) << (result.error ? text_of(result.error) : "");
    EXPECT_EQ(result.losses, unmanaged(setting).losses);
    return result.counts;
  }

  const int threads_before_ = at::get_num_threads();
  const TemporaryFolder folder_;
};

class FaultMatrix : public Faults, public ::testing::WithParamInterface<Setting> {
 protected:
  void SetUp() override {
    std::string why_not;
    if (GetParam().engine == std::string("io_uring") && !UringEngine::available(&why_not)) {
      GTEST_SKIP() << why_not;
    }
  }
};

std::vector<Setting> settings() {
  std::vector<Setting> all;
  for (const char* on_nvme : {"parameters", "optimizer", "gradients"}) {
    for (const char* engine : {"threads", "io_uring"}) {
      for (const char* update : {"immediate", "deferred"}) {
        all.push_back({on_nvme, engine, update});
      }
    }
  }
  return all;
}

std::string name_of_setting(const ::testing::TestParamInfo<Setting>& setting) {
  return ::testing::PrintToString(setting.param);
}

}  // namespace

INSTANTIATE_TEST_SUITE_P(All, FaultMatrix, ::testing::ValuesIn(settings()), name_of_setting);

TEST_P(FaultMatrix, reaches_the_loop_or_changes_nothing) {
  const Setting setting = GetParam();
  const Counts counts = undisturbed(setting);
  const Summary summary = run_all(setting, counts, std::array{0, 1, 2});
  print(setting, counts, summary);
  EXPECT_EQ(summary.fired, summary.runs);
  EXPECT_GT(summary.refused + summary.repeated, 0);
  EXPECT_GT(summary.survived, 0);
}

class FaultsAmidMuch : public FaultMatrix {};

INSTANTIATE_TEST_SUITE_P(All, FaultsAmidMuch,
                         ::testing::Values(Setting{"parameters", "io_uring", "deferred", 4, true},
                                           Setting{"optimizer", "threads", "deferred", 4, true},
                                           Setting{"gradients", "io_uring", "deferred", 4, true}),
                         name_of_setting);

// With prefetch and background updates, whoever meets the fault may not be who needs the bytes.
TEST_P(FaultsAmidMuch, reach_the_loop_or_change_nothing) {
  const Setting setting = GetParam();
  const Counts counts = undisturbed(setting);
  const Summary summary = run_all(setting, counts, std::array{1});
  print(setting, counts, summary);
  // In which phase an operation is submitted is up to the threads: one that had an operation may have none again.
  EXPECT_GT(2 * summary.fired, summary.runs);
  EXPECT_GT(summary.refused + summary.repeated, 0);
  EXPECT_GT(summary.survived, 0);
}

}  // namespace terrace::testing
