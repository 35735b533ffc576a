/// Processes that are killed while they write: what is whole in their stores is what they had written.
#include <algorithm>
#include <array>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include "offload/choose_engine.h"
#include "offload/dead_extent_file.h"
#include "offload/emulated_device.h"
#include "offload/transfer_service.h"
#include "tests/base/temporary_folder.h"

namespace terrace {
namespace {

namespace fs = std::filesystem;
using Content = DeadExtentFile::Content;

constexpr std::size_t extent_bytes = std::size_t{256} << 10U;
constexpr std::uint64_t extent_count = 24;
constexpr int kills = 200;

/// What the writer reports, before it starts a write and when it is told of its end.
struct Note {
  enum class What : std::uint32_t { begun, ended };
  What what;
  std::uint32_t extent;
  std::uint64_t stamp;
};

std::uint64_t word_of(std::uint64_t extent, std::uint64_t stamp, std::size_t position) {
  return (stamp * extent_count + extent) * 0x9e3779b97f4a7c15 + position;
}

/// Whether the bytes are all of that write to that extent.
bool is_write(const std::vector<std::byte>& bytes, std::uint64_t extent, std::uint64_t stamp) {
  if (bytes.size() != extent_bytes) return false;
  for (std::size_t at = 0; at < bytes.size(); at += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + at, 8);
    if (word != word_of(extent, stamp, at)) return false;
  }
  return true;
}

/// The writer, in a process of its own that is started anew from this program: it writes all of its extents over and
/// over, each by a transfer, as many at once as it has, until it is killed.
TEST(KilledStore, DISABLED_writes_until_it_is_killed) {
  const char* const folder = std::getenv("TERRACE_KILLED_STORE");
  if (folder == nullptr) GTEST_SKIP() << "this is for the next test to start";
  const int notes = std::atoi(std::getenv("TERRACE_KILLED_STORE_NOTES"));
  const auto engine = make_io_engine(std::getenv("TERRACE_KILLED_STORE_ENGINE"));
  EmulatedDevice device(1 << 20);
  HostArena arena(extent_bytes, extent_count + TransferService::staging_blocks);
  NvmeStore store({folder}, extent_file_bytes(extent_bytes, extent_count), extent_bytes);
  const std::vector<ExtentId> extents = store.reserve(extent_count);
  const std::vector<std::byte*> blocks = arena.allocate(extent_count);
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::uint32_t> idle;
  for (std::uint32_t i = 0; i < extent_count; ++i) idle.push_back(i);
  TransferService service(device, arena, &store, &*engine);
  const auto note = [&](Note::What what, std::uint32_t extent, std::uint64_t stamp) {
    const Note each{what, extent, stamp};
    if (::write(notes, &each, sizeof each) != sizeof each) std::abort();
  };
  for (std::uint64_t stamp = 1;; ++stamp) {
    std::uint32_t extent = 0;
    {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return !idle.empty(); });
      extent = idle.front();
      idle.erase(idle.begin());
    }
    for (std::size_t at = 0; at < extent_bytes; at += 8) {
      const std::uint64_t word = word_of(extent, stamp, at);
      std::memcpy(blocks[extent] + at, &word, 8);
    }
    note(Note::What::begun, extent, stamp);
    TransferRequest request;
    request.from = Tier::host;
    request.to = Tier::nvme;
    request.bytes = extent_bytes;
    request.prepare = [&, extent] {
      return TransferPlaces{.device = nullptr, .host = {blocks[extent]}, .nvme = {extents[extent]}};
    };
    request.done = [&, extent, stamp](const std::exception_ptr& error) {
      if (error) std::abort();
      note(Note::What::ended, extent, stamp);
      const std::lock_guard lock(mutex);
      idle.push_back(extent);
      changed.notify_all();
    };
    service.start(std::move(request));
  }
}

/// What was reported of an extent: the write that ended last, and one begun since.
struct Known {
  std::optional<std::uint64_t> ended;
  std::optional<std::uint64_t> in_flight;
};

/// Starts a writer, kills it when it has reported so much, and returns what it had reported of each extent by its end.
std::array<Known, extent_count> write_until_killed(const fs::path& folder, const std::string& engine,
                                                   std::uint64_t most_notes) {
  std::array<int, 2> notes{};
  EXPECT_EQ(::pipe(notes.data()), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(notes[0]);
    ::setenv("TERRACE_KILLED_STORE", folder.c_str(), 1);
    ::setenv("TERRACE_KILLED_STORE_NOTES", std::to_string(notes[1]).c_str(), 1);
    ::setenv("TERRACE_KILLED_STORE_ENGINE", engine.c_str(), 1);
    const int nowhere = ::open("/dev/null", O_WRONLY);
    ::dup2(nowhere, 1);
    ::execl("/proc/self/exe", "writer", "--gtest_filter=KilledStore.DISABLED_writes_until_it_is_killed",
            "--gtest_also_run_disabled_tests", nullptr);
    ::_exit(127);
  }
  ::close(notes[1]);
  std::array<Known, extent_count> known;
  Note note{};
  std::uint64_t notes_seen = 0;
  while (::read(notes[0], &note, sizeof note) == static_cast<ssize_t>(sizeof note)) {
    Known& extent = known.at(note.extent);
    if (note.what == Note::What::begun) {
      extent.in_flight = note.stamp;
    } else {
      extent.ended = note.stamp;
      extent.in_flight.reset();
    }
    // When one has just begun.
    if (++notes_seen >= most_notes && note.what == Note::What::begun) ::kill(child, SIGKILL);
  }
  ::close(notes[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << "it ended by itself";
  return known;
}

TEST(KilledStore, says_after_each_of_two_hundred_kills_what_is_whole_and_takes_nothing_for_what_it_is_not) {
  std::random_device entropy;
  const std::uint64_t seed = std::getenv("TERRACE_TEST_SEED") != nullptr
                                 ? std::strtoull(std::getenv("TERRACE_TEST_SEED"), nullptr, 10)
                                 : entropy();
  SCOPED_TRACE("TERRACE_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  int torn = 0;
  int whole = 0;
  int attempts = 0;
  for (int kill = 0; kill < kills && !testing::Test::HasFailure(); ++attempts) {
    ASSERT_LT(attempts, 2 * kills) << "hardly ever was a write in flight";
    // A file system in memory copies page by page, and stops between two of them when it is killed; a drive may go on.
    const bool in_memory = attempts % 2 == 0 && ::access("/dev/shm", W_OK) == 0;
    const TemporaryFolder on_disk;
    const fs::path folder =
        in_memory ? fs::path("/dev/shm/terrace-test-" + std::to_string(::getpid())) : on_disk.path();
    fs::create_directories(folder);
    const auto known =
        write_until_killed(folder, attempts % 4 < 2 ? "threads" : "auto", 1 + random() % (12 * extent_count));
    const bool in_flight =
        std::any_of(known.begin(), known.end(), [](const Known& each) { return each.in_flight.has_value(); });
    kill += in_flight ? 1 : 0;
    {
      const DeadExtentFile file(fs::directory_iterator(folder)->path());
      const std::vector<DeadExtentFile::Extent> extents = file.survey();
      ASSERT_EQ(extents.size(), extent_count);
      for (std::uint64_t i = 0; i < extent_count; ++i) {
        const Known& extent = known[i];
        SCOPED_TRACE("extent " + std::to_string(i) + " after kill " + std::to_string(attempts));
        switch (extents[i].content) {
          case Content::whole: {
            const std::vector<std::byte> bytes = file.read(i);
            EXPECT_TRUE((extent.ended && is_write(bytes, i, *extent.ended)) ||
                        (extent.in_flight && is_write(bytes, i, *extent.in_flight)))
                << "it is taken for what it is not";
            ++whole;
            break;
          }
          case Content::nothing:
            EXPECT_FALSE(extent.ended) << "a write that had ended is lost";
            break;
          case Content::damaged:
            EXPECT_TRUE(extent.in_flight) << "a write that had ended is lost";
            ++torn;
            break;
        }
      }
    }
    // And the next store takes the place of what was left.
    EXPECT_EQ(NvmeStore({folder}, extent_file_bytes(extent_bytes, 1), extent_bytes).removed_files().size(), 1u);
    fs::remove_all(folder);
  }
  EXPECT_GT(torn, 0) << "no kill has met a write in its middle";
  EXPECT_GT(whole, kills);
  std::printf("%d kills with writes in flight, of %d: %d extents whole, %d torn\n", kills, attempts, whole, torn);
}

}  // namespace
}  // namespace terrace
