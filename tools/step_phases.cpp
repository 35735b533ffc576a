#include "tools/step_phases.h"

#include <algorithm>

namespace terrace {
namespace {

constexpr double kForwardShare = 1.0 / 3;  // backward computes twice as much

double& of(StepPhase& phase, Link link) { return phase.bytes[index_of(link)]; }

}  // namespace

std::vector<StepPhase> phases_of_step(const StandInMemory& memory) {
  const double all = memory.parameters;
  const double over_turn = std::max(0.0, all - memory.device_room);
  const double parameters_over_turn = std::max(0.0, memory.nvme_share * over_turn - memory.host_room);
  const double gradients_over_turn = std::max(0.0, all - memory.host_room);
  std::vector<StepPhase> phases;
  for (int batch = 0; batch < memory.micro_batches; ++batch) {
    const bool is_first = batch == 0;
    StepPhase forward{.compute_share = kForwardShare / memory.micro_batches, .updates = is_first};
    of(forward, Link::host_to_device) = is_first ? all : over_turn;
    if (is_first) {  // the update reads gradients and parameters, and writes the parameters
      of(forward, Link::nvme_to_host) = gradients_over_turn + memory.nvme_share * all;
      of(forward, Link::host_to_nvme) = memory.nvme_share * all;
    } else {
      of(forward, Link::nvme_to_host) = parameters_over_turn;
    }
    StepPhase backward{.compute_share = (1 - kForwardShare) / memory.micro_batches};
    of(backward, Link::host_to_device) = over_turn;
    of(backward, Link::device_to_host) = all;
    of(backward, Link::nvme_to_host) = parameters_over_turn;
    of(backward, Link::host_to_nvme) = gradients_over_turn;
    if (!is_first) {  // what is added to
      of(backward, Link::host_to_device) += all;
      of(backward, Link::nvme_to_host) += gradients_over_turn;
    }
    phases.push_back(forward);
    phases.push_back(backward);
  }
  return phases;
}

LinkBytes bytes_of(const std::vector<StepPhase>& phases) {
  LinkBytes sum{};
  for (const StepPhase& phase : phases) {
    for (const Link link : all_links) sum[index_of(link)] += phase.bytes[index_of(link)];
  }
  return sum;
}

double phased_floor_seconds(const std::vector<StepPhase>& phases, const Terms& terms) {
  const LinkBytes sum = bytes_of(phases);
  const auto part = [&](const StepPhase& phase, Link link) {
    const double all = sum[index_of(link)];
    return all == 0 ? 0 : phase.bytes[index_of(link)] / all;
  };
  const double nvme_bytes = sum[index_of(Link::nvme_to_host)] + sum[index_of(Link::host_to_nvme)];
  double seconds = 0;
  for (const StepPhase& phase : phases) {
    const double on_nvme = phase.bytes[index_of(Link::nvme_to_host)] + phase.bytes[index_of(Link::host_to_nvme)];
    seconds += std::max(
        {phase.compute_share * terms[Term::compute], part(phase, Link::host_to_device) * terms[Term::host_to_device],
         part(phase, Link::device_to_host) * terms[Term::device_to_host],
         nvme_bytes == 0 ? 0 : on_nvme / nvme_bytes * terms[Term::nvme], phase.updates ? terms[Term::update] : 0});
  }
  return std::max(seconds, terms.floor_seconds());
}

}  // namespace terrace
