#pragma once

#include <mutex>
#include <set>

namespace tessera {

class Arena;

/// Holds every arena's lock across fork(), so that the child finds no half-done bookkeeping, and declares the arenas dead
/// there: their pages are the parent's.
class ArenaForkHandlers {
 public:
  static ArenaForkHandlers& instance();
  void add(Arena* arena);
  void remove(Arena* arena);

 private:
  ArenaForkHandlers();
  void before();
  void after(bool in_child);

  std::mutex mutex_;
  std::set<Arena*> arenas_;
};

}  // namespace tessera
