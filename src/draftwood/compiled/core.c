/* What drafters do in every cycle, as one library. */
#include "growth.h"
#include "sizing.h"
#include "table.h"
