#include "base/config_keys.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <type_traits>
#include <utility>

#include "base/units.h"

namespace terrace::config_detail {
namespace {

constexpr std::int64_t kMostCount = std::numeric_limits<std::int32_t>::max();  // products of two fit 64 bits
constexpr std::int64_t kMostWhole = std::numeric_limits<std::int64_t>::max();
constexpr double kMostFinite = std::numeric_limits<double>::max();
constexpr double kMostInUpdate = 1e37;  // an update computes in fp32, and its first step with ten times the rate

/// The place of a value in a configuration, const or not.
template <typename Section, typename Member>
auto field(Section Config::*section, Member Section::*member) {
  return [ section, member ](auto& config) -> auto& { return (config.*section).*member; };
}

// Each of these makes the key of one type of value. `place` is what `field` returned.

template <typename Place>
Key size(std::string name, Place place) {
  return {std::move(name), [place](const Value& value, Config& config) { place(config) = value.optional_size(); },
          [place](const Config& config, toml::table& out, std::string_view leaf) {
            const auto& bytes = place(config);
            out.insert_or_assign(leaf, bytes ? format_bytes_exactly(*bytes) : "auto");
          }};
}

template <typename Place>
Key size_or_none(std::string name, std::uint64_t least, Place place) {
  Key key = size(std::move(name), place);
  key.read = [place, least](const Value& value, Config& config) { place(config) = value.optional_size_or_none(least); };
  return key;
}

template <typename Place>
Key size_in_units(std::string name, std::uint64_t unit, std::uint64_t most, Place place) {
  Key key = size(std::move(name), place);
  key.read = [place, unit, most](const Value& value, Config& config) {
    place(config) = value.optional_size_in_units(unit, most);
  };
  return key;
}

template <typename Place>
Key byte_rate(std::string name, Place place) {
  return {std::move(name), [place](const Value& value, Config& config) { place(config) = value.optional_byte_rate(); },
          [place](const Config& config, toml::table& out, std::string_view leaf) {
            const auto& rate = place(config);
            out.insert_or_assign(leaf, rate ? format_bytes_exactly(*rate) + "/s" : "unlimited");
          }};
}

template <typename Place>
Key whole(std::string name, std::int64_t least, std::int64_t most, Place place) {
  return {std::move(name),
          [place, least, most](const Value& value, Config& config) {
            auto& number = place(config);
            number = static_cast<std::remove_reference_t<decltype(number)>>(value.whole_number(least, most));
          },
          [place](const Config& config, toml::table& out, std::string_view leaf) {
            out.insert_or_assign(leaf, static_cast<std::int64_t>(place(config)));
          }};
}

template <typename Place>
Key rate(std::string name, double most, Place place) {
  return {std::move(name), [place, most](const Value& value, Config& config) { place(config) = value.rate(most); },
          [place](const Config& config, toml::table& out, std::string_view leaf) {
            out.insert_or_assign(leaf, place(config));
          }};
}

/// `unsupported` is told of the value before it is compared with the choices, to refuse what has a reason of its own.
template <typename Place>
Key choice(std::string name, std::vector<std::string_view> choices, Place place) {
  return {std::move(name),
          [place, choices = std::move(choices)](const Value& value, Config& config) {
            place(config) = value.one_of(choices);
          },
          [place](const Config& config, toml::table& out, std::string_view leaf) {
            out.insert_or_assign(leaf, place(config));
          }};
}

template <typename Place>
Key paths(std::string name, Place place) {
  return {std::move(name), [place](const Value& value, Config& config) { place(config) = value.paths(); },
          [place](const Config& config, toml::table& out, std::string_view leaf) {
            toml::array list;
            for (const auto& path : place(config)) list.push_back(path.string());
            out.insert_or_assign(leaf, std::move(list));
          }};
}

template <typename Place>
Key shares(std::string name, Place place) {
  return {std::move(name), [place](const Value& value, Config& config) { place(config) = value.optional_shares(); },
          [place](const Config& config, toml::table& out, std::string_view leaf) {
            const std::optional<Config::Shares>& shares = place(config);
            if (!shares) {
              out.insert_or_assign(leaf, "auto");
              return;
            }
            toml::table table{{"device", shares->device}, {"host", shares->host}, {"nvme", shares->nvme}};
            table.is_inline(true);
            out.insert_or_assign(leaf, std::move(table));
          }};
}

Key log_level_key() {
  return {"log.level",
          [](const Value& value, Config& config) {
            const std::string name = value.one_of({"trace", "debug", "info", "warning", "error", "off"});
            config.log.level = log_level_from_name(name).value();
          },
          [](const Config& config, toml::table& out, std::string_view leaf) {
            out.insert_or_assign(leaf, log_level_name(config.log.level));
          }};
}

std::vector<Key> make_keys() {
  return {
      choice("device.kind", {"auto", "cuda", "emulated"}, field(&Config::device, &Config::Device::kind)),
      size("device.memory", field(&Config::device, &Config::Device::memory)),
      size("device.chunks", field(&Config::device, &Config::Device::chunks)),
      byte_rate("device.link", field(&Config::device, &Config::Device::link)),
      whole("device.latency_us", 0, 1'000'000, field(&Config::device, &Config::Device::latency_us)),
      size("host.memory", field(&Config::host, &Config::Host::memory)),
      paths("nvme.paths", field(&Config::nvme, &Config::Nvme::paths)),
      size("nvme.memory", field(&Config::nvme, &Config::Nvme::memory)),
      shares("placement.parameters", field(&Config::placement, &Config::Placement::parameters)),
      shares("placement.gradients", field(&Config::placement, &Config::Placement::gradients)),
      shares("placement.optimizer", field(&Config::placement, &Config::Placement::optimizer)),
      choice("placement.activations", {"auto", "keep", "host", "nvme", "recompute"},
             field(&Config::placement, &Config::Placement::activations)),
      size("placement.chunk", field(&Config::placement, &Config::Placement::chunk)),
      choice("placement.order", {"auto", "construction", "use"}, field(&Config::placement, &Config::Placement::order)),
      choice("optimizer.update", {"deferred", "immediate"}, field(&Config::optimizer, &Config::Optimizer::update)),
      choice("optimizer.states", {"float32", "split", "split_bfloat16"},
             field(&Config::optimizer, &Config::Optimizer::states)),
      choice("optimizer.non_finite", {"pass", "skip", "error"},
             field(&Config::optimizer, &Config::Optimizer::non_finite)),
      choice("optimizer.accumulate", {"gradient", "float32"},
             field(&Config::optimizer, &Config::Optimizer::accumulate)),
      choice("io.engine", {"auto", "io_uring", "threads"}, field(&Config::io, &Config::Io::engine)),
      size_in_units("io.block", Config::Io::block_unit, Config::Io::most_block, field(&Config::io, &Config::Io::block)),
      whole("io.depth", 0, Config::Io::most_depth, field(&Config::io, &Config::Io::depth)),
      whole("io.prefetch", 0, 1024, field(&Config::io, &Config::Io::prefetch)),
      size_or_none("timeline.memory", Config::Timeline::least_memory,
                   field(&Config::timeline, &Config::Timeline::memory)),
      log_level_key(),
      choice("model.family", {"gpt"}, field(&Config::model, &Config::Model::family)),
      whole("model.layers", 1, kMostCount, field(&Config::model, &Config::Model::layers)),
      whole("model.heads", 1, kMostCount, field(&Config::model, &Config::Model::heads)),
      whole("model.width", 1, kMostCount, field(&Config::model, &Config::Model::width)),
      whole("model.sequence", 1, kMostCount, field(&Config::model, &Config::Model::sequence)),
      choice("model.dtype", {"float32", "bfloat16"}, field(&Config::model, &Config::Model::dtype)),
      paths("data.paths", field(&Config::data, &Config::Data::paths)),
      choice("data.tokenizer", {"bytes"}, field(&Config::data, &Config::Data::tokenizer)),
      whole("train.steps", 1, kMostWhole, field(&Config::train, &Config::Train::steps)),
      whole("train.micro_batch", 1, kMostCount, field(&Config::train, &Config::Train::micro_batch)),
      whole("train.accumulate", 1, kMostCount, field(&Config::train, &Config::Train::accumulate)),
      whole("train.seed", 0, kMostWhole, field(&Config::train, &Config::Train::seed)),
      rate("train.learning_rate", kMostInUpdate, field(&Config::train, &Config::Train::learning_rate)),
      whole("train.warmup", 0, kMostWhole, field(&Config::train, &Config::Train::warmup)),
      rate("train.weight_decay", kMostInUpdate, field(&Config::train, &Config::Train::weight_decay)),
      rate("train.max_gradient_norm", kMostFinite, field(&Config::train, &Config::Train::max_gradient_norm)),
  };
}

}  // namespace

const std::vector<Key>& keys() {
  static const std::vector<Key> all = make_keys();
  return all;
}

const Key* find_key(std::string_view name) {
  const auto found = std::find_if(keys().begin(), keys().end(), [&](const Key& key) { return key.name == name; });
  return found == keys().end() ? nullptr : &*found;
}

const std::vector<std::string>& key_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const Key& key : keys()) all.push_back(key.name);
    return all;
  }();
  return names;
}

const std::vector<std::string>& section_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const Key& key : keys()) {
      if (all.empty() || all.back() != key.section()) all.push_back(key.section());
    }
    return all;
  }();
  return names;
}

}  // namespace terrace::config_detail
