//! Hazards of a shared object: requests to the loader that an artifact never needs.
//!
//! | request | effect on the process that loads the object |
//! |---|---|
//! | an executable stack (`GNU_STACK` with `E`, or no `GNU_STACK`) | all thread stacks become executable, or the load fails |
//! | a segment that is writable and executable | memory that can be changed and then run |
//! | text relocations (`DT_TEXTREL`) | code is made writable while it is loaded |
//! | `DT_RPATH`, `DT_RUNPATH` | libraries are searched for in folders of the builder's machine |
//! | exported symbols of the C++ library's own code | they bind to another copy of the library, and a call crashes |
//!
//! A compiler that links the C++ library statically causes the last one, unless the link hides its symbols. Templates
//! of the C++ library that an object instantiates are weak symbols, as in every C++ object: no hazard.
//!
//! A process under `PR_SET_MDWE` (systemd: `MemoryDenyWriteExecute=`) can't load an object with one of the first three;
//! glibc 2.41 refuses the first everywhere. A build refuses all five by name. The runtime does not check them.

use std::fmt;

use object::{
    LittleEndian as Little, elf,
    read::{ReadRef, elf::ProgramHeader},
};

use super::{Elf, ElfError};

/// A request to the loader that an artifact may not make.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Hazard {
    /// `GNU_STACK` with `E`, or no `GNU_STACK`.
    ExecutableStack,
    /// A segment that is writable and executable.
    WritableCode,
    /// `DT_TEXTREL`, or its flag: code that is written while it is loaded.
    TextRelocations,
    /// `DT_RPATH` or `DT_RUNPATH`: folders of the builder's machine.
    LibraryPath,
    /// Strong definitions in the namespaces of the C++ library.
    CppLibrary,
}

impl fmt::Display for Hazard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ExecutableStack => "it asks for an executable stack",
            Self::WritableCode => "it has a segment that is writable and executable",
            Self::TextRelocations => "it has text relocations",
            Self::LibraryPath => "it says where libraries are looked for (RPATH or RUNPATH)",
            Self::CppLibrary => "it exports the C++ library, which the compiler linked statically",
        })
    }
}

/// Prefixes of the C++ library's names: `std`, its ABI, and `operator new` and `delete`.
const CPP_LIBRARY: [&[u8]; 8] = [
    b"_ZNSt",
    b"_ZNKSt",
    b"_ZSt",
    b"_ZTVN10__cxxabiv1",
    b"__cxa_",
    b"__gxx_",
    b"_Znwm",
    b"_ZdlPv",
];

impl<'d, R: ReadRef<'d>> Elf<'d, R> {
    /// Returns the hazards, each once, sorted.
    pub fn hazards(&self) -> Result<Vec<Hazard>, ElfError> {
        let mut found = Vec::new();
        let mut plain_stack = false;
        for segment in self.segments()? {
            let flags = segment.p_flags(Little).0;
            let executable = flags & elf::PF_X.0 != 0;
            match segment.p_type(Little) {
                elf::PT_GNU_STACK => plain_stack = !executable,
                elf::PT_LOAD if executable && flags & elf::PF_W.0 != 0 => {
                    found.push(Hazard::WritableCode);
                }
                _ => {}
            }
        }
        // The kernel and the loader take a missing header as a request for an executable stack.
        if !plain_stack {
            found.push(Hazard::ExecutableStack);
        }
        let dynamic = self.dynamic()?;
        if dynamic.text_relocations {
            found.push(Hazard::TextRelocations);
        }
        if dynamic.rpath.is_some() || dynamic.runpath.is_some() {
            found.push(Hazard::LibraryPath);
        }
        for symbol in self.symbols()? {
            let symbol = symbol?;
            let strong = symbol.defined && !symbol.weak;
            if strong && CPP_LIBRARY.iter().any(|own| symbol.name.starts_with(own)) {
                found.push(Hazard::CppLibrary);
                break;
            }
        }
        found.sort_unstable();
        found.dedup();
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path, process::Command};

    use super::*;

    fn hazards(bytes: &[u8]) -> Result<Vec<Hazard>, ElfError> {
        Elf::parse(bytes)?.hazards()
    }

    /// Links a shared object with a pointer in a section of these flags. In a read-only section that is a text
    /// relocation.
    fn linked(folder: &Path, section: &str, flags: &[&str]) -> Vec<u8> {
        let (source, object) = (folder.join("a.s"), folder.join("a.so"));
        let text = format!(
            "\t.data\nheld:\t.quad 1\n\t.section .table,\"{section}\",@progbits\n\t.quad held\n\
            \t.section .note.GNU-stack,\"\",@progbits\n"
        );
        fs::write(&source, text).unwrap();
        let done = Command::new("gcc")
            .args(["-shared", "-nostdlib", "-o"])
            .args([&object, &source])
            .args(flags)
            .output()
            .unwrap();
        assert!(done.status.success(), "{done:?}");
        fs::read(object).unwrap()
    }

    #[test]
    fn each_hazard_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let made = |section, flags: &[&str]| linked(folder.path(), section, flags);
        let found = |flags: &[&str]| hazards(&made("aw", flags)).unwrap();
        assert_eq!(found(&[]), []);
        assert_eq!(found(&["-Wl,-z,execstack"]), [Hazard::ExecutableStack]);
        let old = ["-Wl,--disable-new-dtags", "-Wl,-rpath,/somewhere"];
        assert_eq!(found(&old), [Hazard::LibraryPath]);
        let new = ["-Wl,--enable-new-dtags", "-Wl,-rpath,$ORIGIN"];
        assert_eq!(found(&new), [Hazard::LibraryPath]);
        let [text, both] = ["ax", "awx"].map(|section| made(section, &["-Wl,-z,notext"]));
        assert_eq!(hazards(&text).unwrap(), [Hazard::TextRelocations]);
        assert_eq!(hazards(&both).unwrap(), [Hazard::WritableCode]);
        let two = made("ax", &["-Wl,-z,notext", "-Wl,-z,execstack"]);
        let two = hazards(&two).unwrap();
        assert_eq!(two, [Hazard::ExecutableStack, Hazard::TextRelocations]);
    }

    #[test]
    fn text_relocations_are_found_by_entry_or_flag_and_only_before_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let whole = linked(folder.path(), "ax", &["-Wl,-z,notext"]);
        // The linker writes both entries.
        let entry = |tag: u64, value: u64| [tag.to_le_bytes(), value.to_le_bytes()].concat();
        let words = [entry(22, 0), entry(30, 4)];
        let at = |bytes: &[u8], word: &[u8]| {
            let mut entries = (0..bytes.len() - 16).step_by(8);
            entries.find(|at| bytes[*at..].starts_with(word)).unwrap()
        };
        let mut none = whole.clone();
        for word in &words {
            let mut one = whole.clone();
            let place = at(&one, word);
            // DT_DEBUG has no effect in a shared object.
            one[place..][..16].copy_from_slice(&entry(21, 0));
            assert_eq!(hazards(&one).unwrap(), [Hazard::TextRelocations]);
            none[place..][..16].copy_from_slice(&entry(21, 0));
        }
        assert_eq!(hazards(&none).unwrap(), []);
        let mut behind = whole;
        let first = at(&behind, &words[0]).min(at(&behind, &words[1]));
        behind[first - 16..][..16].copy_from_slice(&entry(0, 0));
        assert_eq!(hazards(&behind).unwrap(), []);
        assert_eq!(
            Hazard::TextRelocations.to_string(),
            "it has text relocations"
        );
    }

    #[test]
    fn an_object_without_a_stack_header_requests_an_executable_stack() {
        let folder = tempfile::tempdir().unwrap();
        let mut bytes = linked(folder.path(), "aw", &[]);
        let table = u64::from_le_bytes(bytes[32..40].try_into().unwrap()) as usize;
        let stack = elf::PT_GNU_STACK.0.to_le_bytes();
        let at = (table..).step_by(56).find(|at| bytes[*at..][..4] == stack);
        bytes[at.unwrap()..][..4].fill(0);
        assert_eq!(hazards(&bytes).unwrap(), [Hazard::ExecutableStack]);
    }

    #[test]
    fn a_static_cpp_library_is_a_hazard_only_if_it_is_exported() {
        let folder = tempfile::tempdir().unwrap();
        let (source, object) = (folder.path().join("a.cpp"), folder.path().join("a.so"));
        let text = "#include <regex>\nextern \"C\" bool f(const char *s) {\n\
            return std::regex_match(s, std::regex(\"[[:alpha:]]+\")); }\n";
        fs::write(&source, text).unwrap();
        let found = |flags: &[&str]| {
            let done = Command::new("g++")
                .args(["-shared", "-fPIC", "-o"])
                .args([&object, &source])
                .args(flags)
                .output()
                .unwrap();
            assert!(done.status.success(), "{done:?}");
            hazards(&fs::read(&object).unwrap()).unwrap()
        };
        assert_eq!(found(&[]), []);
        assert_eq!(found(&["-static-libstdc++"]), [Hazard::CppLibrary]);
        let hidden = ["-static-libstdc++", "-Wl,--exclude-libs,ALL"];
        assert_eq!(found(&hidden), []);
    }

    #[test]
    fn this_program_has_no_hazard_of_memory() {
        let own = fs::read(std::env::current_exe().unwrap()).unwrap();
        let found = hazards(&own).unwrap();
        // The link may add the folder of libtorch.
        assert!(found.iter().all(|hazard| *hazard == Hazard::LibraryPath));
    }
}
