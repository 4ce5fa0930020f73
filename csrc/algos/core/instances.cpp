// The instances that instances.h declares.
#define AI3_DEFINES_INSTANCES
#include "instances.h"

namespace ai3::inline AI3_LEVEL {
AI3_INSTANCES_()
}  // namespace ai3::inline AI3_LEVEL
