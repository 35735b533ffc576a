#include "base/units.h"

#include <cstdint>
#include <limits>
#include <random>
#include <string>

#include <gtest/gtest.h>

#include "base/error.h"

namespace terrace {
namespace {

constexpr std::uint64_t kMost = std::numeric_limits<std::uint64_t>::max();

/// Why `text` is refused; empty if it is not.
std::string refusal(std::string_view text) {
  try {
    parse_bytes(text);
  } catch (const ConfigError& error) {
    EXPECT_NE(error.hint().find("512MiB"), std::string::npos) << "the hint shows no good value: " << error.hint();
    return error.message();
  }
  return "";
}

TEST(ParseBytes, reads_every_unit) {
  EXPECT_EQ(parse_bytes("7B"), 7U);
  EXPECT_EQ(parse_bytes("7KB"), 7'000U);
  EXPECT_EQ(parse_bytes("7MB"), 7'000'000U);
  EXPECT_EQ(parse_bytes("7GB"), 7'000'000'000U);
  EXPECT_EQ(parse_bytes("7TB"), 7'000'000'000'000U);
  EXPECT_EQ(parse_bytes("7KiB"), 7ULL << 10);
  EXPECT_EQ(parse_bytes("7MiB"), 7ULL << 20);
  EXPECT_EQ(parse_bytes("7GiB"), 7ULL << 30);
  EXPECT_EQ(parse_bytes("7TiB"), 7ULL << 40);
}

TEST(ParseBytes, reads_decimals_exactly_and_drops_a_fraction_of_a_byte) {
  EXPECT_EQ(parse_bytes("1.5GiB"), 3ULL << 29);
  EXPECT_EQ(parse_bytes("0.1GB"), 100'000'000U);
  EXPECT_EQ(parse_bytes("0.1KiB"), 102U);  // 102.4
  EXPECT_EQ(parse_bytes("1.9999999999999999999999999999999999KiB"), 2047U);
  EXPECT_EQ(parse_bytes("16777215.999999999999999999TiB"), kMost);  // a double would round it over the top
}

TEST(ParseBytes, allows_blanks_around_its_parts) {
  EXPECT_EQ(parse_bytes("64 MiB"), 64ULL << 20);
  EXPECT_EQ(parse_bytes(" 64 \t MiB "), 64ULL << 20);
}

TEST(ParseBytes, allows_zero_and_the_most_that_64_bits_hold) {
  EXPECT_EQ(parse_bytes("0B"), 0U);
  EXPECT_EQ(parse_bytes("18446744073709551615B"), kMost);
}

TEST(ParseBytes, refuses_what_is_no_size_and_says_why) {
  EXPECT_EQ(refusal(""), "\"\" is not a size: it is empty");
  EXPECT_EQ(refusal("  "), "\"  \" is not a size: it is empty");
  EXPECT_EQ(refusal("-5MiB"), "\"-5MiB\" is not a size: it is negative");
  EXPECT_EQ(refusal("64"), "\"64\" is not a size: the unit is missing");
  EXPECT_EQ(refusal("64XB"), "\"64XB\" is not a size: unknown unit \"XB\"");
  EXPECT_EQ(refusal("64MiBs"), "\"64MiBs\" is not a size: unknown unit \"MiBs\"");
  EXPECT_EQ(refusal("MiB"), "\"MiB\" is not a size: it does not begin with a number");
  EXPECT_EQ(refusal("5.MiB"), "\"5.MiB\" is not a size: digits are missing after the point");
}

TEST(ParseBytes, refuses_other_ways_to_write_a_number) {
  for (const char* text : {"+5MiB", ".5MiB", "1e3MiB", "1_000MiB", "1,5MiB", "0x10B", "1.5.5MiB", "infGiB", "5 5MiB",
                           "64mib", "64M", "lots", "5MiB\n", "\xff"}) {
    EXPECT_NE(refusal(text), "") << text;
  }
}

TEST(ParseBytes, refuses_what_64_bits_cannot_hold) {
  EXPECT_EQ(refusal("18446744073709551616B"), "\"18446744073709551616B\" is not a size: it is too large");
  EXPECT_NE(refusal("16777216TiB"), "");
  EXPECT_NE(refusal("99999999999999999999999999999999TiB"), "");
  EXPECT_NE(refusal(std::string(1000, '9') + "B"), "");
}

TEST(FormatBytes, is_exact_for_a_whole_number_of_a_unit) {
  EXPECT_EQ(format_bytes(0), "0B");
  EXPECT_EQ(format_bytes(1000), "1000B");
  EXPECT_EQ(format_bytes(1024), "1KiB");
  EXPECT_EQ(format_bytes(64ULL << 20), "64MiB");
  EXPECT_EQ(format_bytes(5000ULL << 40), "5000TiB");
}

TEST(FormatBytes, is_rounded_otherwise) {
  EXPECT_EQ(format_bytes(3ULL << 29), "1.50GiB");
  EXPECT_EQ(format_bytes((1ULL << 30) + 1), "1.00GiB");
  EXPECT_EQ(format_bytes((99ULL << 20) + (1ULL << 19)), "99.50MiB");
  EXPECT_EQ(format_bytes((200ULL << 20) + (300ULL << 10)), "200.3MiB");
}

TEST(FormatBytes, never_rounds_up_to_1024_of_a_unit) {
  EXPECT_EQ(format_bytes((1ULL << 20) - 1), "1.00MiB");
  EXPECT_EQ(format_bytes((100ULL << 20) - 1), "100.0MiB");
  EXPECT_EQ(format_bytes(kMost), "16777216.0TiB");  // there is no unit above
}

TEST(FormatBytes, exactly_is_read_back_as_the_same_number) {
  EXPECT_EQ(format_bytes_exactly(0), "0B");
  EXPECT_EQ(format_bytes_exactly(3ULL << 29), "1536MiB");
  EXPECT_EQ(format_bytes_exactly(1001), "1001B");
  EXPECT_EQ(format_bytes_exactly(100'000'000'000), "100GB");
  EXPECT_EQ(format_bytes_exactly(1'024'000), "1000KiB") << "larger than KB, smaller than what would need a fraction";
  EXPECT_EQ(parse_bytes(format_bytes_exactly(kMost)), kMost);
  constexpr std::uint64_t kSeed = 20250101;
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  std::mt19937_64 random(kSeed);
  for (int round = 0; round < 10'000; ++round) {
    const std::uint64_t bytes = (random() >> (random() % 64)) << (random() % 40);
    ASSERT_EQ(parse_bytes(format_bytes_exactly(bytes)), bytes);
  }
}

}  // namespace
}  // namespace terrace
