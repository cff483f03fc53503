/* art_atomic.h: one spelling for an atomic field that C11 and C++ both accept.
 *
 * ART_ATOMIC(T) is _Atomic(T) in C and std::atomic<T> in C++ (same size and alignment for the lock-free types used
 * here), so that public headers can be read by C++ without a second copy. Code that touches such fields is C only.
 */
#ifndef ART_ATOMIC_H
#define ART_ATOMIC_H

#ifdef __cplusplus
#include <atomic>
#define ART_ATOMIC(T) std::atomic<T>
#else
#include <stdatomic.h>
#define ART_ATOMIC(T) _Atomic(T)
#endif

#endif
