#pragma once

#include <functional>
#include <vector>

namespace tessera {

/// Calls `action` when the backward that runs on this thread has ended: the outermost one, as far as NestedBackward says
/// which are nested. To be called inside a backward. Not called if that backward ends with an exception.
void at_end_of_backward(std::function<void()> action);

/// Is a node of a backward being computed on this thread? In the callbacks at the end of a backward: was it nested in
/// another?
bool inside_node();

/// Held around a backward that a node of another backward runs.
class NestedBackward {
 public:
  NestedBackward();
  ~NestedBackward();
  NestedBackward(const NestedBackward&) = delete;
  NestedBackward& operator=(const NestedBackward&) = delete;

 private:
  friend void at_end_of_backward(std::function<void()> action);
  NestedBackward* const outer_;
  int exceptions_;
  std::vector<std::function<void()>> actions_;
};

}  // namespace tessera
