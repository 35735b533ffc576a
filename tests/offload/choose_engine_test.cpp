#include "offload/choose_engine.h"

#include <cerrno>
#include <memory>
#include <string>
#include <sys/syscall.h>
#include <utility>

#include <gtest/gtest.h>

#include "base/error.h"
#include "offload/uring_engine.h"
#include "tests/base/noted.h"
#include "tests/offload/fault_injecting_engine.h"
#include "tests/offload/refused_call.h"

namespace terrace {
namespace {

TEST(ChooseEngine, takes_io_uring_where_it_is_available_and_threads_by_name) {
  EXPECT_EQ(make_io_engine("auto")->name(), UringEngine::available() ? "io_uring" : "threads");
  EXPECT_EQ(make_io_engine("threads")->name(), "threads");
}

TEST(ChooseEngine, falls_back_to_threads_only_if_the_choice_was_left_open) {
  EXPECT_TRUE(holds_where_call_is_refused(SYS_io_uring_setup, EPERM, [] {
    if (make_io_engine("auto")->name() != "threads") return false;
    if (noted("threads read and write").find("Operation not permitted (EPERM)") == std::string::npos) return false;
    try {
      make_io_engine("io_uring");
      return false;
    } catch (const ConfigError& error) {
      return std::string(error.what()).find("is not available: opening a ring failed: Operation not permitted") !=
             std::string::npos;
    }
  }));
}

TEST(ChooseEngine, refuses_other_names) {
  for (const char* name : {"", "posix", "IO_URING"}) EXPECT_THROW(make_io_engine(name), ConfigError);
}

TEST(ChooseEngine, can_be_decorated_by_a_test) {
  decorate_io_engines([](std::unique_ptr<IoEngine> engine) {
    EXPECT_EQ(engine->name(), "threads");
    return std::make_unique<FaultInjectingEngine>(std::move(engine));
  });
  EXPECT_EQ(make_io_engine("threads")->name(), "fault_injecting");
  decorate_io_engines(nullptr);
  EXPECT_EQ(make_io_engine("threads")->name(), "threads");
}

}  // namespace
}  // namespace terrace
