/* The per-cycle work of drafters as one library. */
#include "blend.h"
#include "chains.h"
#include "growth.h"
#include "places.h"
#include "sizing.h"
#include "table.h"
