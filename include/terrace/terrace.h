#pragma once

/// Everything a program that trains with Terrace needs: one session, its optimizers, and blocks, also of many
/// micro-batches.

#include "integration/adamw.h"
#include "integration/block.h"
#include "integration/layer_major.h"
#include "integration/session.h"
#include "integration/sgd.h"
