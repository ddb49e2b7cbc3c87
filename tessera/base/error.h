#pragma once

#include <stdexcept>
#include <string>

namespace tessera {

/// What a user or the environment did wrong. Each message says what, where (full parameter name, file, rank), what was
/// wanted, what was found, and what to do. Faults of our own are `TESSERA_CHECK` failures instead.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// An option, a configuration key, or an argument of a call that can't be used.
class ConfigError : public Error {
 public:
  using Error::Error;
};

/// A file or data set that is missing, empty, damaged or too small.
class DataError : public Error {
 public:
  using Error::Error;
};

/// A resource (memory, disk, a descriptor, a system call) that the system refused.
class SystemError : public Error {
 public:
  using Error::Error;
};

/// A parameter used, written or replaced in a way that sharding can't keep right.
class GuardError : public Error {
 public:
  using Error::Error;
};

/// Ranks that disagree: models, initial values, order or kind of operations.
class AgreementError : public Error {
 public:
  using Error::Error;
};

/// A peer that died, failed, left, or did not arrive within the time-out. The message names the rank.
class PeerError : public Error {
 public:
  using Error::Error;
};

/// A loss or gradient that is not a finite number. Raised on all ranks alike.
class NonFiniteError : public Error {
 public:
  using Error::Error;
};

}  // namespace tessera
