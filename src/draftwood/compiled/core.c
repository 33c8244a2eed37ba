/* The per-cycle work of drafters as one library. */
#define _GNU_SOURCE /* CPU affinity */
#include "blend.h"
#include "chains.h"
#include "context.h"
#include "found.h"
#include "growth.h"
#include "places.h"
#include "sizing.h"
#include "spines.h"
#include "store.h"
#include "table.h"
#include "trees.h"
