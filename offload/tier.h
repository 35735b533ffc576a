/// The words that every floor shares for where bytes live, what they are, and which way they move.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace terrace {

/// Where bytes live, fastest first.
enum class Tier : std::uint8_t { device, host, nvme };
inline constexpr std::size_t tier_count = 3;
inline constexpr std::array<Tier, tier_count> all_tiers{Tier::device, Tier::host, Tier::nvme};

/// What bytes are. The kinds of a tier sum to what is used of it.
enum class Kind : std::uint8_t { parameter, gradient, master, momentum, variance, activation, buffer, other };
inline constexpr std::size_t kind_count = 8;
inline constexpr std::array<Kind, kind_count> all_kinds{Kind::parameter, Kind::gradient,   Kind::master, Kind::momentum,
                                                        Kind::variance,  Kind::activation, Kind::buffer, Kind::other};

/// The direction in which bytes cross between neighbouring tiers.
enum class Link : std::uint8_t { nvme_to_host, host_to_nvme, host_to_device, device_to_host };
inline constexpr std::size_t link_count = 4;
inline constexpr std::array<Link, link_count> all_links{Link::nvme_to_host, Link::host_to_nvme, Link::host_to_device,
                                                        Link::device_to_host};

constexpr std::size_t index_of(Tier tier) noexcept { return static_cast<std::size_t>(tier); }
constexpr std::size_t index_of(Kind kind) noexcept { return static_cast<std::size_t>(kind); }
constexpr std::size_t index_of(Link link) noexcept { return static_cast<std::size_t>(link); }

/// Whether bytes of this kind live in chunks; the others are the program's own tensors and what else a tier holds.
constexpr bool is_chunk_kind(Kind kind) noexcept { return kind <= Kind::activation; }

constexpr std::string_view name_of(Tier tier) noexcept {
  constexpr std::array<std::string_view, tier_count> names{"device", "host", "nvme"};
  return names[index_of(tier)];
}

constexpr std::string_view name_of(Kind kind) noexcept {
  constexpr std::array<std::string_view, kind_count> names{"parameter", "gradient",   "master", "momentum",
                                                           "variance",  "activation", "buffer", "other"};
  return names[index_of(kind)];
}

constexpr std::string_view name_of(Link link) noexcept {
  constexpr std::array<std::string_view, link_count> names{"nvme→host", "host→nvme", "host→device", "device→host"};
  return names[index_of(link)];
}

}  // namespace terrace
