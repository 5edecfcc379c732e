/* Numbers that one process shows and others of its host read, with what makes them a proof.

   Order. A writer clears a number before its memory is used for something else: everything that it does afterwards comes later for
   a reader, too. A reader looks after it has read the memory: what it finds stood while it read. Processors that order less than
   x86 need the fences for that, and so do x86's stores that pass the caches.

   Life. A process that is killed clears nothing, and other memory of it may have another owner before anything else shows that it is
   dead: the driver of a GPU takes its memory back while the process still ends. So one thread of the writer vouches for the numbers:
   it owns a word beside them, and has given the kernel a robust list that names it. When that thread ends, the kernel clears its
   number there, before it closes any file of the process, and so before any driver takes anything back. A number counts only
   while the word has an owner.

   The list lies beside the word, and not where the C library keeps its own: that is private memory, which the kernel may take
   from a process that it kills for want of memory before it looks at the list. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

/* As the kernel has it: each entry points to the next, the last one to the head, and `word` is that far from each entry. */
struct entry {
    struct entry *next;
};

struct robust_list {
    struct entry first;
    long to_word;
    struct entry *pending;
};

struct life {
    uint32_t owner; /* thread id in the low 30 bits; 0 once the thread has ended */
    struct robust_list list;
    struct entry entry;
    struct robust_list *before; /* what the thread had given the kernel */
};

#define THREAD_ID 0x3fffffffu

_Static_assert(sizeof(struct life) <= 64, "the numbers begin behind 64 bytes");

static int is_alive(const struct life *life) {
    return (__atomic_load_n(&life->owner, __ATOMIC_SEQ_CST) & THREAD_ID) != 0;
}

/* The calling thread vouches for the numbers from now on, until it ends; whether that is possible here. */
int vouch(void *of) {
#if defined(SYS_set_robust_list) && defined(SYS_get_robust_list) && defined(SYS_gettid)
    struct life *life = of;
    size_t size = 0;
    if (syscall(SYS_get_robust_list, 0, &life->before, &size)) return 0;
    life->list.first.next = &life->entry;
    life->list.to_word = (long)offsetof(struct life, owner) - (long)offsetof(struct life, entry);
    life->list.pending = NULL;
    life->entry.next = &life->list.first;
    if (syscall(SYS_set_robust_list, &life->list, sizeof life->list)) return 0;
    __atomic_store_n(&life->owner, (uint32_t)syscall(SYS_gettid), __ATOMIC_SEQ_CST);
    return 1;
#else
    (void)of;
    return 0;
#endif
}

/* What is shown counts no more. Any thread may call this. */
void disown(void *of) {
    struct life *life = of;
    __atomic_store_n(&life->owner, 0, __ATOMIC_SEQ_CST);
}

/* The thread that vouches does so no more. Not left to its end: by then the memory may be another one, which the kernel would read. */
void withdraw(void *of) {
    disown(of);
#ifdef SYS_set_robust_list
    struct life *life = of;
    syscall(SYS_set_robust_list, life->before, sizeof life->list);
#endif
}

static void *vouch_and_end(void *life) {
    return vouch(life) ? life : NULL;
}

/* Whether the kernel really clears the word of a thread that ends: a sandbox may say that it has taken a list, and never look at it. */
int can_vouch(void) {
    struct life life = {0};
    pthread_t thread;
    void *vouched = NULL;
    if (pthread_create(&thread, NULL, vouch_and_end, &life)) return 0;
    return !pthread_join(thread, &vouched) && vouched && !is_alive(&life);
}

void write_stamp(uint64_t *slot, uint64_t value) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    __atomic_store_n(slot, value, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

/* What stands in a slot, 0 if the thread that vouches for it is dead: looked at last, so that it lived behind all that was read. */
uint64_t read_stamp(const void *life, const uint64_t *slot) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    uint64_t value = __atomic_load_n(slot, __ATOMIC_SEQ_CST);
    return is_alive(life) ? value : 0;
}
