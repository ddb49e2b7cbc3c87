#include "tessera/storage/arena_fork_handlers.h"

#include <pthread.h>

#include <cstring>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/storage/arena.h"

namespace tessera {

ArenaForkHandlers& ArenaForkHandlers::instance() {
  static auto* handlers = new ArenaForkHandlers;  // never destroyed: arenas may outlive static destructors
  return *handlers;
}

ArenaForkHandlers::ArenaForkHandlers() {
  const int failed =
      pthread_atfork([] { instance().before(); }, [] { instance().after(false); }, [] { instance().after(true); });
  if (failed) throw SystemError(text("can't register fork handlers for the arenas: ", std::strerror(failed)));
}

void ArenaForkHandlers::add(Arena* arena) {
  std::lock_guard lock(mutex_);
  arenas_.insert(arena);
}

void ArenaForkHandlers::remove(Arena* arena) {
  std::lock_guard lock(mutex_);
  arenas_.erase(arena);
}

void ArenaForkHandlers::before() {
  mutex_.lock();
  for (Arena* arena : arenas_) arena->mutex_.lock();
}

void ArenaForkHandlers::after(bool in_child) {
  for (Arena* arena : arenas_) {
    arena->inherited_ = arena->inherited_ || in_child;
    arena->mutex_.unlock();
  }
  mutex_.unlock();
}

}  // namespace tessera
