/* agentrt_process.h: process ABI 1, for agents that are programs in C. One file, libc only; include it in one source file.
 *
 *     int main(void)
 *     {
 *         agentrt_answer answer;
 *         agentrt_start();
 *         if (agentrt_call("tool.call", "{\"tool\":\"add\",\"args\":{\"x\":1,\"y\":2}}", &answer)) {
 *             return agentrt_stop(&answer);
 *         }
 *         return agentrt_return(answer.value);
 *     }
 *
 * The program runs from its top whenever its run is brought back, and what it asks for is answered as before: so what it
 * asks for must depend on its input, its answers, agentrt_clock_now and agentrt_random only. Requests and answers are
 * JSON text (docs/syscalls.md says which), docs/process-abi.md is the manual.
 *
 * One thread. Texts that are handed out end with a zero, belong to this file, and hold until the next wait or call; input
 * and restored state hold for good. When the node is gone the process ends: the node's successor starts another.
 */
#ifndef AGENTRT_PROCESS_H
#define AGENTRT_PROCESS_H

#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define AGENTRT_PROCESS_ABI 1

enum agentrt_status {
    AGENTRT_EFAILED = -1, /* the step failed: value is its error, an object with code and message */
    AGENTRT_EUNWIND = -2, /* the run was told to end: undo what should not stay, asking for more if need be, then
                           * agentrt_unwound; value is the reason, as a JSON text */
};

/* What a wait gives. `value` is `length` bytes of JSON and a zero. */
typedef struct agentrt_answer {
    int handle;
    int status; /* 0, or an agentrt_status */
    const char *value;
    size_t length;
} agentrt_answer;

static struct {
    int fd, handles, open;
    volatile sig_atomic_t noticed;
    char *input, *restored;        /* the values of the first lines */
    size_t input_length, restored_length;
    char run_id[64];
    char *line;                    /* the last line, without its newline */
    size_t line_length, held, room; /* of it; of what has been read, with what is behind it; of the memory */
    size_t out_length;             /* of what is to be written */
    char out[16384];
} agentrt_self; /* all zeros before agentrt_start */

static inline void agentrt_notice_(int number)
{
    (void)number;
    agentrt_self.noticed = 1;
}

static inline void agentrt_flush_(void)
{
    const char *data = agentrt_self.out;
    while (agentrt_self.out_length) {
        ssize_t count = write(agentrt_self.fd, data, agentrt_self.out_length);
        if (count > 0) {
            data += count;
            agentrt_self.out_length -= (size_t)count;
        } else if (errno != EINTR) {
            _exit(0);
        }
    }
}

static inline void agentrt_write_(const char *data, size_t length)
{
    while (length) {
        size_t room = sizeof agentrt_self.out - agentrt_self.out_length;
        size_t count = length < room ? length : room;
        memcpy(agentrt_self.out + agentrt_self.out_length, data, count);
        agentrt_self.out_length += count;
        data += count;
        length -= count;
        if (agentrt_self.out_length == sizeof agentrt_self.out) {
            agentrt_flush_();
        }
    }
}

static inline void agentrt_say_(const char *text) { agentrt_write_(text, strlen(text)); }

/* The text without newlines: inside a JSON string there are none, elsewhere they mean as much as spaces. */
static inline void agentrt_say_json_(const char *json)
{
    while (*json) {
        size_t count = strcspn(json, "\r\n");
        agentrt_write_(json, count);
        json += count;
        json += strspn(json, "\r\n");
    }
}

static inline void agentrt_say_number_(long long number)
{
    char text[24];
    agentrt_write_(text, (size_t)snprintf(text, sizeof text, "%lld", number));
}

/* A text as JSON. */
static inline void agentrt_say_text_(const char *text)
{
    agentrt_say_("\"");
    for (; *text; text++) {
        unsigned char c = (unsigned char)*text;
        char escaped[8];
        if (c == '"' || c == '\\' || c < 0x20) {
            agentrt_write_(escaped, (size_t)snprintf(escaped, sizeof escaped, "\\u%04x", c));
        } else {
            agentrt_write_(text, 1);
        }
    }
    agentrt_say_("\"");
}

/* Says what there is to say, and reads the next line into agentrt_self.line. */
static inline void agentrt_listen_(void)
{
    agentrt_flush_();
    if (agentrt_self.line) { /* drop the one before */
        size_t gone = agentrt_self.line_length + 1;
        agentrt_self.held -= gone;
        memmove(agentrt_self.line, agentrt_self.line + gone, agentrt_self.held);
    }
    size_t seen = 0;
    for (;;) {
        char *end = NULL;
        if (agentrt_self.held > seen) {
            end = (char *)memchr(agentrt_self.line + seen, '\n', agentrt_self.held - seen);
        }
        if (end) {
            *end = 0;
            agentrt_self.line_length = (size_t)(end - agentrt_self.line);
            return;
        }
        seen = agentrt_self.held;
        if (agentrt_self.room - agentrt_self.held < 4096) {
            agentrt_self.room = agentrt_self.room ? 2 * agentrt_self.room : 65536;
            char *line = (char *)realloc(agentrt_self.line, agentrt_self.room);
            if (!line) {
                abort();
            }
            agentrt_self.line = line;
        }
        ssize_t count = read(agentrt_self.fd, agentrt_self.line + agentrt_self.held, agentrt_self.room - agentrt_self.held);
        if (count > 0) {
            agentrt_self.held += (size_t)count;
        } else if (count == 0 || errno != EINTR) {
            _exit(0);
        }
    }
}

/* Where the line goes on after this, NULL if it begins otherwise. */
static inline const char *agentrt_after_(const char *text, const char *begin)
{
    size_t length = strlen(begin);
    return strncmp(text, begin, length) ? NULL : text + length;
}

/* The payload of a line that begins with this: it reaches up to the line's last brace, which becomes a zero. */
static inline const char *agentrt_payload_(const char *begin, size_t *length)
{
    const char *payload = agentrt_after_(agentrt_self.line, begin);
    if (!payload) {
        fprintf(stderr, "agentrt: expected %s, got %.80s\n", begin, agentrt_self.line);
        _exit(70);
    }
    agentrt_self.line[agentrt_self.line_length - 1] = 0;
    *length = agentrt_self.line_length - 1 - (size_t)(payload - agentrt_self.line);
    return payload;
}

static inline char *agentrt_keep_(const char *begin, size_t *length)
{
    const char *payload = agentrt_payload_(begin, length);
    char *kept = (char *)malloc(*length + 1);
    if (!kept) {
        abort();
    }
    return (char *)memcpy(kept, payload, *length + 1);
}

/* First of all. Ends the process when it was not started by a node. */
static inline void agentrt_start(void)
{
    const char *fd = getenv("AGENTRT_SOCKET");
    if (!fd) {
        fprintf(stderr, "agentrt: AGENTRT_SOCKET is not set: this program is started by a node\n");
        exit(64);
    }
    agentrt_self.fd = atoi(fd);
    unsetenv("AGENTRT_SOCKET");
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = agentrt_notice_;
    action.sa_flags = SA_RESTART;
    sigaction(SIGUSR1, &action, NULL);
    signal(SIGPIPE, SIG_IGN);
    agentrt_say_("{\"ready\":1}\n");
    agentrt_listen_();
    const char *run_id = strstr(agentrt_self.line, "\"run_id\":\"");
    if (run_id) {
        snprintf(agentrt_self.run_id, sizeof agentrt_self.run_id, "%.*s", (int)strcspn(run_id + 10, "\""), run_id + 10);
    }
    int restored = strstr(agentrt_self.line, "\"restored\":true}}") != NULL; /* the last member */
    agentrt_listen_();
    agentrt_self.input = agentrt_keep_("{\"input\":", &agentrt_self.input_length);
    if (restored) {
        agentrt_listen_();
        agentrt_self.restored = agentrt_keep_("{\"restored\":", &agentrt_self.restored_length);
    }
}

static inline const char *agentrt_run_id(void) { return agentrt_self.run_id; }

/* The run's input, JSON. `length` may be NULL. */
static inline const char *agentrt_input(size_t *length)
{
    if (length) {
        *length = agentrt_self.input_length;
    }
    return agentrt_self.input;
}

/* The state of the run's last checkpoint, JSON; NULL before the first. */
static inline const char *agentrt_restored(size_t *length)
{
    if (length) {
        *length = agentrt_self.restored_length;
    }
    return agentrt_self.restored;
}

/* Ask without waiting; it leaves at the next wait. Returns the handle of the step: 1, 2, 3, … */
static inline int agentrt_submit(const char *op, const char *request)
{
    agentrt_say_("{\"ask\":");
    agentrt_say_number_(++agentrt_self.handles);
    agentrt_self.open++;
    agentrt_say_(",\"op\":");
    agentrt_say_text_(op);
    agentrt_say_(",\"request\":");
    agentrt_say_json_(request);
    agentrt_say_("}\n");
    return agentrt_self.handles;
}

static inline void agentrt_say_handles_(const char *what, const int *handles, int count)
{
    agentrt_say_("{\"");
    agentrt_say_(what);
    agentrt_say_("\":[");
    for (int i = 0; i < count; i++) {
        agentrt_say_(i ? "," : "");
        agentrt_say_number_(handles[i]);
    }
    agentrt_say_("]}\n");
}

/* Wait until one of the steps is answered; which one is part of the run's history. Returns answer->status. */
static inline int agentrt_wait_any(const int *handles, int count, agentrt_answer *answer)
{
    agentrt_say_handles_("wait", handles, count);
    agentrt_listen_();
    answer->handle = 0;
    if (agentrt_after_(agentrt_self.line, "{\"unwind\":")) {
        answer->value = agentrt_payload_("{\"unwind\":", &answer->length);
        answer->status = AGENTRT_EUNWIND;
        agentrt_self.open = 0;
        agentrt_say_("{\"unwinding\":true}\n");
        return answer->status;
    }
    const char *number = agentrt_after_(agentrt_self.line, "{\"answer\":");
    const char *value = strstr(agentrt_self.line, ",\"value\":"); /* numbers and ok are all that is before it */
    if (!number || !value) {
        fprintf(stderr, "agentrt: expected an answer, got %.80s\n", agentrt_self.line);
        _exit(70);
    }
    answer->handle = atoi(number);
    const char *ok = strstr(agentrt_self.line, "\"ok\":true");
    answer->status = ok && ok < value ? 0 : AGENTRT_EFAILED;
    answer->value = value + 9;
    agentrt_self.line[agentrt_self.line_length - 1] = 0;
    answer->length = agentrt_self.line_length - 1 - (size_t)(answer->value - agentrt_self.line);
    agentrt_self.open--;
    return answer->status;
}

/* Ask and wait. Returns answer->status. */
static inline int agentrt_call(const char *op, const char *request, agentrt_answer *answer)
{
    int handle = agentrt_submit(op, request);
    return agentrt_wait_any(&handle, 1, answer);
}

/* This answer will never be waited for. */
static inline void agentrt_abandon(int handle)
{
    agentrt_say_handles_("abandon", &handle, 1);
    agentrt_self.open--;
}

/* A line for the operator, silent in replay. No step. `level`: debug, info, warning or error. */
static inline void agentrt_log(const char *level, const char *message)
{
    agentrt_say_("{\"ask\":0,\"op\":\"log\",\"request\":{\"level\":");
    agentrt_say_text_(level);
    agentrt_say_(",\"message\":");
    agentrt_say_text_(message);
    agentrt_say_("}}\n");
}

/* The run's clock, Unix ns: the same when it is brought back. No step. */
static inline int64_t agentrt_clock_now(void)
{
    size_t length;
    agentrt_say_("{\"ask\":0,\"op\":\"clock.now\"}\n");
    agentrt_listen_();
    return strtoll(agentrt_payload_("{\"value\":", &length), NULL, 10);
}

/* Fill the buffer from the run's own seed, at most 65,536 bytes at once: the same when it is brought back. No step. */
static inline void agentrt_random(void *buffer, size_t count)
{
    size_t length;
    agentrt_say_("{\"ask\":0,\"op\":\"random.bytes\",\"request\":{\"count\":");
    agentrt_say_number_((long long)count);
    agentrt_say_("}}\n");
    agentrt_listen_();
    const char *hex = agentrt_payload_("{\"value\":\"", &length);
    for (size_t i = 0; i < count; i++) {
        char pair[3] = {hex[2 * i], hex[2 * i + 1], 0};
        ((unsigned char *)buffer)[i] = (unsigned char)strtoul(pair, NULL, 16);
    }
}

/* Whether more urgent work needs the CPU: an agentrt_snapshot within 50 ms keeps this process from being stopped. */
static inline int agentrt_noticed(void) { return agentrt_self.noticed; }

/* If noticed, hand over the state (JSON): the process is ended, and started again later with it as its restored state.
 * Returns, and the program goes on, if there was no notice or it cannot be put away now. Cheap enough for a loop; where
 * it is called has no influence on what a replay must ask for. */
static inline void agentrt_snapshot(const char *state)
{
    size_t length;
    if (!agentrt_self.noticed || agentrt_self.open) {
        return;
    }
    agentrt_self.noticed = 0;
    agentrt_say_("{\"snapshot\":");
    agentrt_say_json_(state);
    agentrt_say_("}\n");
    agentrt_listen_();
    agentrt_payload_("{\"refused\":", &length);
}

static inline int agentrt_last_(const char *text)
{
    agentrt_say_(text);
    agentrt_flush_();
    return 0;
}

/* The ends. Each is the program's last word and returns what main should: 0. */
static inline int agentrt_return(const char *result)
{
    agentrt_say_("{\"return\":");
    agentrt_say_json_(result);
    return agentrt_last_("}\n");
}

static inline int agentrt_fail(const char *code, const char *message)
{
    agentrt_say_("{\"fail\":{\"code\":");
    agentrt_say_text_(code);
    agentrt_say_(",\"message\":");
    agentrt_say_text_(message);
    return agentrt_last_("}}\n");
}

static inline int agentrt_unwound(void)
{
    return agentrt_last_("{\"unwound\":true}\n");
}

/* End with an answer that is none: a failed step is the run's error, and there is nothing to undo. */
static inline int agentrt_stop(const agentrt_answer *answer)
{
    if (answer->status == AGENTRT_EUNWIND) {
        return agentrt_unwound();
    }
    agentrt_say_("{\"fail\":");
    agentrt_say_json_(answer->value);
    return agentrt_last_("}\n");
}

#endif
