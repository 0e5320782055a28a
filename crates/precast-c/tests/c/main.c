/* Runs the parts of the tests: main LIBTORCH STORE. */
#include "check.h"

int main(int argc, char **argv) {
  CHECK(argc == 3);
  precast_runtime *runtime = GARBAGE;
  FAILS(PRECAST_CODE_LOAD_FAILED, "no libtorch", precast_libtorch("/nowhere", 0));
  FAILS(PRECAST_CODE_LOAD_FAILED, "no libtorch", precast_libtorch(NULL, 0));
  FAILS(PRECAST_CODE_LOAD_FAILED, "no libtorch", precast_runtime_open(argv[2], NULL, &runtime));
  CHECK(runtime == NULL);
  OK(precast_libtorch(argv[1], 0));
  OK(precast_libtorch(NULL, 0));

  sessions(argv[2]);
  mistakes(argv[2]);
  printf("done\n");
  return 0;
}
