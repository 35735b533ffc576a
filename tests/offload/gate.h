/// Holds a thread at a place until it is let go.
#pragma once

#include <future>

namespace terrace {

class Gate {
 public:
  void pass() {
    entered_.set_value();
    opened_.get_future().wait();
  }
  void wait_until_entered() { entered_.get_future().wait(); }
  void open() { opened_.set_value(); }

 private:
  std::promise<void> entered_, opened_;
};

}  // namespace terrace
