//! The functions that an artifact imports from libtorch.
//!
//! An artifact names no libraries, so the loader looks its functions up in the libtorch of the process. Another version
//! may lack some. A build records the names, and the runtime looks them up before it loads the object.
//!
//! | counted | example |
//! |---|---|
//! | the C ABI for artifacts | `aoti_torch_empty_strided` |
//! | the stable C ABI | `torch_new_list_reserve_size` |
//! | C++ in a namespace of torch | `_ZN3c106detail14torchCheckFailEPKcS2_jS2_` |
//!
//! Functions of the C library, of the compiler's runtime and of operators' libraries are not counted: the loader
//! reports missing ones.

use std::collections::BTreeSet;

use object::read::ReadRef;

use super::{Elf, ElfError};

/// C++ namespaces of libtorch, as they begin a mangled name.
const NAMESPACES: [&str; 5] = ["2at", "3c10", "4c10d", "5torch", "6caffe2"];

impl<'d, R: ReadRef<'d>> Elf<'d, R> {
    /// Returns the functions that a shared object imports from libtorch, each once, sorted.
    ///
    /// Weak ones are left out: the loader accepts the object without them.
    pub fn imports(&self) -> Result<Vec<String>, ElfError> {
        let mut found = BTreeSet::new();
        for symbol in self.symbols()? {
            let symbol = symbol?;
            if !symbol.defined
                && !symbol.weak
                && let Ok(name) = std::str::from_utf8(symbol.name)
                && is_of_torch(name)
            {
                found.insert(name.to_owned());
            }
        }
        Ok(found.into_iter().collect())
    }
}

/// Returns whether a function of this name belongs to libtorch.
fn is_of_torch(name: &str) -> bool {
    let Some(mangled) = name.strip_prefix("_Z") else {
        return name.starts_with("aoti_torch_") || name.starts_with("torch_");
    };
    // A virtual table, type information, or its name: `_ZTVN3c10…`.
    let mangled = match mangled.as_bytes() {
        [b'T', b'V' | b'I' | b'S' | b'T', ..] => &mangled[2..],
        _ => mangled,
    };
    // Qualifiers of a member: `_ZNK3c10…`, `_ZNKR3c10…`.
    let nested = mangled.strip_prefix('N');
    let scope = nested.map(|rest| rest.trim_start_matches(['r', 'V', 'K', 'R', 'O']));
    scope.is_some_and(|scope| NAMESPACES.iter().any(|space| scope.starts_with(space)))
}

#[cfg(test)]
mod tests {
    use std::{fs, process::Command};

    use super::*;

    #[test]
    fn functions_of_libtorch_are_listed_once() {
        let folder = tempfile::tempdir().unwrap();
        let (source, object) = (folder.path().join("a.c"), folder.path().join("a.so"));
        let text = "\
            int aoti_torch_zero_(void *), aoti_torch_copy_(void *), torch_list_size(void *), aoti_torch_own(void);\n\
            int _ZN3c106detail4failEv(void), _ZNK2at6Tensor3dimEv(void), _ZN4mine1fEv(void), puts(const char *);\n\
            int aoti_torch_maybe(void) __attribute__((weak)), cuLaunchKernel(void);\n\
            int aoti_torch_own(void) { return 0; }\n\
            int run(void *a) {\n\
              return aoti_torch_zero_(a) + aoti_torch_zero_(a) + aoti_torch_copy_(a) + torch_list_size(a) + puts(\"\")\n\
                + _ZN3c106detail4failEv() + _ZNK2at6Tensor3dimEv() + _ZN4mine1fEv() + aoti_torch_own()\n\
                + (aoti_torch_maybe ? aoti_torch_maybe() : 0) + cuLaunchKernel();\n\
            }\n";
        fs::write(&source, text).unwrap();
        let done = Command::new("gcc")
            .args(["-shared", "-fPIC", "-o"])
            .args([&object, &source])
            .output()
            .unwrap();
        assert!(done.status.success(), "{done:?}");
        let bytes = fs::read(&object).unwrap();
        let imports = Elf::parse(&*bytes).unwrap().imports().unwrap();
        let ours = "_ZN3c106detail4failEv _ZNK2at6Tensor3dimEv aoti_torch_copy_ aoti_torch_zero_ torch_list_size";
        assert_eq!(imports.join(" "), ours);
        for end in (0..bytes.len()).step_by(101) {
            // Truncated anywhere: an error or fewer names, no panic.
            let _ = Elf::parse(&bytes[..end]).and_then(|elf| elf.imports());
        }
    }

    #[test]
    fn names_of_torch_have_its_namespaces() {
        let torchs = "_ZTVN3c1013TensorImplE _ZTIN5torch8autograd4NodeE _ZNKR3c106IValue5toIntEv";
        let others =
            "_ZNSt6vectorIN2at6TensorEE4pushEv _Z3addN2at6TensorE torchvision malloc _Z _ZT";
        for (names, is) in [(torchs, true), (others, false)] {
            for name in names.split(' ') {
                assert_eq!(is_of_torch(name), is, "{name}");
            }
        }
    }
}
