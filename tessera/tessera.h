#pragma once

/// All of Tessera that a training program needs.
#include "tessera/base/error.h"
#include "tessera/checkpoint/load.h"
#include "tessera/engine/annotate.h"
#include "tessera/engine/deferred.h"
#include "tessera/engine/ema.h"
#include "tessera/engine/forward.h"
#include "tessera/engine/fully_shard.h"
#include "tessera/engine/recompute.h"
#include "tessera/mesh/mesh.h"
#include "tessera/mesh/world.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/muon.h"
#include "tessera/optim/optimizer_state.h"
