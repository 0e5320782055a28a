/* Checks for the C programs of the tests. */
#ifndef CHECK_H
#define CHECK_H

#include <precast.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                               \
  do {                                                                 \
    if (!(condition)) {                                                \
      fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);  \
      abort();                                                         \
    }                                                                  \
  } while (0)

/* Ends the program unless a call succeeds. */
#define OK(call)                                                                           \
  do {                                                                                     \
    precast_error *error_ = (call);                                                        \
    if (error_ != NULL) {                                                                  \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, error_->message);      \
      abort();                                                                             \
    }                                                                                      \
  } while (0)

/* Ends the program unless a call fails with a code, and a message that contains a text. */
#define FAILS(want, text, call)                                                            \
  do {                                                                                     \
    precast_error *error_ = (call);                                                        \
    if (error_ == NULL || error_->code != (want) || strstr(error_->message, (text)) == NULL) { \
      fprintf(stderr, "%s:%d: %s: %d %s\n", __FILE__, __LINE__, #call,                     \
              error_ == NULL ? 0 : (int)error_->code, error_ == NULL ? "" : error_->message); \
      abort();                                                                             \
    }                                                                                      \
    CHECK(error_->hint != NULL && strstr(error_->hint, "::") == NULL);                     \
    precast_error_free(error_);                                                            \
  } while (0)

/* An address that is no object: a pointer that a function must replace. */
#define GARBAGE ((void *)(size_t)0x5a5a5a5a)

/* The parts of the tests, each over the store of main.rs. */
void sessions(const char *store);
void mistakes(const char *store);

#endif
