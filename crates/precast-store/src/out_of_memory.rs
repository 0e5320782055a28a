//! Recognizes out-of-memory errors by their text: torch, CUDA, the C++ library and the system give no error code that
//! reaches a message.
//!
//! One list for all stages. The Python worker has its own copy (`failures.py`), which a test compares.

/// Every such message contains one of these phrases.
const WORDS: [&str; 5] = [
    // torch's allocator, the CUDA driver and runtime, the C++ compiler.
    "out of memory",
    // Names of codes of the driver and of NVRTC.
    "OUT_OF_MEMORY",
    // cuBLAS, cuDNN and their kin.
    "STATUS_ALLOC_FAILED",
    // torch on the CPU (`can't`) and the system (`Cannot`).
    "allocate memory",
    "std::bad_alloc",
];

/// A library without room for its thread-local variables: a retry also fails.
const OTHER: &str = "static TLS block";

/// Returns whether a message reports too little memory, of a device or of the host.
pub fn says_out_of_memory(text: &str) -> bool {
    WORDS.iter().any(|words| text.contains(words)) && !text.contains(OTHER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_torch_cuda_and_the_system() {
        for text in [
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.72 GiB",
            "CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY",
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
            "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED",
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9000000000000 bytes",
            "fork: Cannot allocate memory (os error 12)",
            "terminate called after throwing an instance of 'std::bad_alloc'",
        ] {
            assert!(says_out_of_memory(text), "{text}");
        }
        for text in [
            "size mismatch",
            "out of resource: shared memory, Required: 294912, Hardware limit: 232448",
            "a.so: cannot allocate memory in static TLS block",
        ] {
            assert!(!says_out_of_memory(text), "{text}");
        }
    }

    #[test]
    fn the_worker_knows_the_same_words() {
        let worker = include_str!("../../precast-builder/worker/failures.py");
        let quoted = |name: &str| -> Vec<&str> {
            let named = |line: &&str| line.starts_with(&format!("{name} = "));
            let line = worker.lines().find(named).unwrap();
            line.split('"').skip(1).step_by(2).collect()
        };
        assert_eq!(quoted("_SHORT"), WORDS);
        assert_eq!(quoted("_OTHER"), [OTHER]);
    }
}
